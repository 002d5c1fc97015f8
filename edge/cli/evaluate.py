"""`edge eval`: quality figures."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from edge.cli import options as o
from edge.cli.evaluate_kv import kv
from edge.cli.show import print_json, progress

evaluate = typer.Typer(help="Measure a model's quality.")
evaluate.command()(kv)


@evaluate.command()
def perplexity(
    model: o.ModelArgument,
    text: Annotated[Path, o.flag("--text", help="A UTF-8 text file.")],
    tokens: Annotated[int | None, o.flag("--tokens", min=1, help="Score only the first so many.")] = None,
    memory: o.Memory = None,
    kv_policy: o.KVPolicy = "streaming",
    max_kv_size: o.MaxKVSize = None,
    kv_memory: o.KVMemory = None,
    sinks: o.Sinks = 4,
    kv_dtype: o.KVDtype = None,
    prefill_step_size: o.PrefillStepSize = None,
    backend: o.Backend = "auto",
    threads: o.Threads = None,
    json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Perplexity of a text, streamed through the KV cache under its policy. Lower is better."""
    from edge.cli.prompts import read_text
    from edge.opened import open_model
    from edge.plan import PlanRequest
    from edge.quality.perplexity import LOGITS_ROWS
    from edge.quality.perplexity import perplexity as measure
    from edge.session import load

    opened = open_model(model)
    ids = opened.encode_prompt(read_text(text), raw=True)[: None if tokens is None else tokens + 1]
    request = PlanRequest(
        kv_policy=kv_policy,
        sinks=sinks,
        max_kv_size=max_kv_size,
        kv_memory=kv_memory,
        kv_dtype=kv_dtype,
        prefill_step_size=prefill_step_size,
        threads=threads,
        expected_tokens=ids.size,
        logits_rows=LOGITS_ROWS,
    )
    with (
        progress(enabled=not quiet) as shown,
        load(opened, backend=backend, memory=memory, request=request) as session,
    ):
        result = measure(session, ids, on_progress=shown.step("perplexity"))
        capacity, kv_policy = session.plan.config.capacity, session.plan.kv_policy
    if json:
        settings = {"model": opened.spec.label, "kv_policy": kv_policy, "kv_capacity": capacity}
        print_json({**asdict(result), **settings})
    else:
        print(
            f"perplexity {result.perplexity:.4f} (nll {result.nll:.5f} ± {result.stderr:.5f}) "
            f"over {result.tokens} tokens, KV {kv_policy}, {capacity} rows"
        )
