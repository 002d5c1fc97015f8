"""`edge plan`: what would fit, counted without loading weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from edge.budget import format_bytes
from edge.cli import options as o
from edge.cli.show import print_json, table

if TYPE_CHECKING:
    from edge.plan import Plan
    from edge.streaming import Streaming


def plan(
    model: o.ModelArgument,
    memory: o.Memory = None,
    kv_policy: o.KVPolicy = "streaming",
    max_kv_size: o.MaxKVSize = None,
    kv_memory: o.KVMemory = None,
    sinks: o.Sinks = 4,
    kv_dtype: o.KVDtype = None,
    prefill_step_size: o.PrefillStepSize = None,
    tokens: Annotated[
        int | None,
        o.flag("--tokens", min=1, help="Prompt and answer together, if you know (default: no end)."),
    ] = None,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    json: o.Json = False,
) -> None:
    """Show how a model would run within a memory budget: the bytes, and the settings that were chosen."""
    from edge.backends import find_backend
    from edge.budget import Budget
    from edge.opened import open_model
    from edge.plan import PlanRequest, make_plan
    from edge.streaming import streaming_cost

    opened = open_model(model)
    engine = find_backend(backend, opened.file, opened.spec, kv_dtype)
    request = PlanRequest(
        kv_policy=kv_policy,
        sinks=sinks,
        max_kv_size=max_kv_size,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        prefill_step_size=prefill_step_size,
        threads=threads,
        expected_tokens=tokens,
    )
    made = make_plan(opened.spec, engine, request, Budget.parse(memory))
    streaming = streaming_cost(made.bytes.streamed)
    if json:
        streamed = streaming and asdict(streaming)
        print_json({"model": opened.spec.label, "path": str(opened.path), **made.to_dict(), "streaming": streamed})
        return
    count, config = made.bytes, made.config
    rows: list[tuple[str, str, int]] = [
        ("interpreter", "this process and the engine's libraries", count.interpreter),
        ("weights", _weights(made), count.weights),
        ("KV cache", f"{config.capacity} rows, {config.kv_dtype}", count.kv),
        ("scratch", f"prefill chunk of {config.chunk} tokens", count.scratch),
        ("predicted peak", "estimated", made.predicted_peak),
        ("limit", made.limit_source, made.limit),
    ]
    print(table(["what", "how", "bytes", "size"], [[a, b, str(n), format_bytes(n)] for a, b, n in rows], left=2))
    print(
        f"\n{opened.spec.label} on {made.backend}, {config.threads} threads, KV policy {made.kv_policy}"
        + (f" with {made.sinks} sinks" if made.sinks else "")
        + f"\ntuned: {made.tuned}"
    )
    if streaming:
        print(_slower(streaming, count.weights, opened.spec.weight_bytes))


def _slower(streaming: Streaming, resident: int, weights: int) -> str:
    text = (
        f"weights: {format_bytes(resident)} of {format_bytes(weights)} in memory at a time, "
        f"{format_bytes(streaming.bytes)} streamed per token"
    )
    if streaming.cached_s is None or streaming.disk_s is None:
        return text
    return (
        f"{text}, which adds {1e3 * streaming.cached_s:.1f} ms to each\nwhile the system keeps their file in its page "
        f"cache, up to {1e3 * streaming.disk_s:.0f} ms if it does not (both measured here)"
    )


def _weights(made: Plan) -> str:
    if made.bytes.streamed:
        return "of a mapped file, at a time"
    return "repacked in memory" if made.config.repack else "mapped from a file"
