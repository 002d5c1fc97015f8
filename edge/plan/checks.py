"""Options that no plan can meet are refused: before anything is counted, in one line."""

from __future__ import annotations

from dataclasses import replace
from reprlib import repr as brief

import numpy as np

from edge.backends import engines_with
from edge.backends.base import Backend, Capabilities
from edge.backends.counts import FixedSizes
from edge.devices.host import logical_cores
from edge.errors import InputError, UnsupportedError
from edge.kv import DEFAULT_SINKS, Needs, pinned_rows
from edge.kv.policy import check_options
from edge.model.spec import ModelSpec
from edge.options import AUTO, Options
from edge.types import GRANULARITIES

SMALLEST_ROWS = 256  # below this a chat model cannot follow its own template
WRITABLE_ROWS = 8  # of the smallest cache, beside the pinned and the recent ones


def check_request(spec: ModelSpec, backend: Backend, options: Options, *, elsewhere: bool) -> None:
    """Raises InputError for impossible options, UnsupportedError for what the engine lacks. elsewhere: for a device
    with other cores."""
    has = backend.CAPABILITIES
    if missing := _missing(options.policy.needs, has):
        raise UnsupportedError(
            f"--kv-policy={options.kv_policy} {missing}, and {backend.NAME} is none: use --kv-policy=streaming"
        )
    if options.provider is not None and not has.providers:
        other = engines_with("providers")[0]
        raise UnsupportedError(f"--provider is for the {other} engine, not for {backend.NAME}: use --backend={other}")
    if options.lora and not has.lora:
        others = " or ".join(engines_with("lora"))
        raise UnsupportedError(f"the {backend.NAME} engine runs no LoRA adapters: use --backend={others}")
    if options.gpu_layers is not None and not has.gpu_layers:
        other = engines_with("gpu_layers")[0]
        raise UnsupportedError(f"--gpu-layers is for the {other} engine, not for {backend.NAME}: use --backend={other}")
    if options.gpu_memory is not None and not has.gpu and options.backend != AUTO:
        other = engines_with("gpu")[0]
        raise UnsupportedError(f"--gpu-memory is for the {other} engine, not for {backend.NAME}: use --backend={other}")
    if options.kv_dtype is not None and options.kv_dtype not in has.kv_dtypes:
        raise UnsupportedError(
            f"the {backend.NAME} engine has no KV dtype {options.kv_dtype!r}: choose {', '.join(has.kv_dtypes)}"
        )
    _check_sinks(spec, options)
    most = backend.most_rows(spec, options.expected_tokens)
    for flag, value, low, high in (
        ("--max-kv-size", options.max_kv_size, least_rows(pinned(options)), most.rows),
        ("expected_tokens", options.expected_tokens, 1, 1 << 40),
        ("logits_rows", options.logits_rows, 1, 8192),
        ("--prefill-step-size", options.prefill_step_size, 1, 8192),
        ("--threads", options.threads, 1, 1024),
        ("--gpu-layers", options.gpu_layers, 0, spec.layers + 1),  # the output layer is one more
    ):
        check_count(flag, value, low, high, f" ({most.why})" if high == most.rows else "")
    if not elsewhere:
        check_threads(options.threads)
    if has.granularity == "token" and not _keeps_newest(options):
        raise UnsupportedError(
            f"--kv-policy={options.kv_policy} may evict the newest row, from which positions go on in {backend.NAME}: "
            "give recent a larger share"
        )


def check_static_sizes(spec: ModelSpec, rows: int | None, chunk: int | None) -> None:
    """Of graphs that are written or compiled for this model. Raises InputError."""
    check_count("--max-kv-size", rows, least_rows(0), spec.context, f" ({spec.context} positions is all it knows)")
    check_count("--prefill-step-size", chunk, 2, (rows or spec.context) // 2, " (half of the KV rows)")


def with_fixed_sizes(options: Options, fixed: FixedSizes) -> Options:
    """The options of a run whose graphs have fixed sizes. Raises InputError for more than they have, UnsupportedError
    for KV rows of another type."""
    if fixed.compiled and options.kv_memory is not None:
        raise InputError(f"--kv-memory: the model was compiled for {fixed.rows} KV rows: leave it out")
    stated = {"--max-kv-size": options.max_kv_size, "--prefill-step-size": options.prefill_step_size}
    for (flag, value), most in zip(stated.items(), (fixed.rows, fixed.chunk), strict=True):
        if fixed.compiled and value is not None and value > most:
            raise InputError(
                f"{flag} {value} is more than the {most} that the model was compiled for: convert it again with "
                f"{flag} {value}"
            )
    if options.kv_dtype not in (None, *fixed.kv_dtypes):
        there = "compiled for" if fixed.compiled else "run with"
        raise UnsupportedError(
            f"--kv-dtype={options.kv_dtype}: on an NPU this model is {there} {' or '.join(fixed.kv_dtypes)}"
        )
    rows = options.max_kv_size
    if rows is None and options.kv_memory is None:
        rows = fixed.rows if fixed.compiled else max(fixed.rows, min(options.expected_tokens or 0, fixed.context))
    return replace(
        options,
        max_kv_size=rows,
        prefill_step_size=options.prefill_step_size or max(1, min(fixed.chunk, (rows or fixed.rows) // 2)),
        kv_dtype=options.kv_dtype or fixed.kv_dtypes[0],
    )


def check_count(name: str, value: object, low: int = 1, high: int | None = None, why: str = "") -> None:
    """None, or a whole number of at least `low` and at most `high`; why: the reason for that. Raises InputError."""
    if value is None:
        return
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or (high is None and value < low):
        raise InputError(f"{name} must be a whole number, at least {low}, not {brief(value)}")
    if high is not None and not low <= value <= high:
        raise InputError(f"{name} must be from {low} to {high}, not {brief(value)}{why if value > high else ''}")


def check_threads(threads: int | None) -> None:
    """Threads wait for each other at every barrier, so that two on one core slow all down. Raises InputError."""
    cores = logical_cores()
    if threads is not None and not 1 <= threads <= cores:
        raise InputError(
            f"--threads must be from 1 to {cores}, the logical cores that edge may use here, not {threads}"
        )


def pinned(options: Options) -> int:
    """Rows that stay; of a policy that evicts none, as many as its cache must have room for."""
    policy = options.policy
    return pinned_rows(policy) if policy.evicts else options.sinks


def least_rows(pinned: int) -> int:
    """The pinned rows, as many recent ones, and a few to write to."""
    return 2 * pinned + WRITABLE_ROWS


def _check_sinks(spec: ModelSpec, options: Options) -> None:
    check_options(options.sinks)  # of policies without sinks, too
    sinks, rows = pinned(options), options.max_kv_size
    needed = least_rows(sinks)
    if sinks <= DEFAULT_SINKS:
        return  # of too small a cache its rows are the fault
    flag = "--keep" if sinks == options.keep else "--sinks"
    if needed > spec.context:
        most = sinks - (needed - spec.context + 1) // 2
        raise InputError(f"{flag} {sinks} is too many for the {spec.context} positions of the model: at most {most}")
    if rows is not None and rows < needed:
        raise InputError(f"{flag} {sinks} needs at least {needed} KV rows: raise --max-kv-size {rows} or lower {flag}")


def _keeps_newest(options: Options) -> bool:
    """However few rows an eviction leaves: half of the cache at least."""
    recent = getattr(options.policy, "recent", 1)
    return int(recent * ((options.max_kv_size or SMALLEST_ROWS) // 2)) > 0


def _missing(needs: Needs, has: Capabilities) -> str | None:
    """What a policy needs and the engine does not have."""
    if needs.queries and not has.attention:
        return "needs an engine that shows attention"
    if needs.keys and not has.keys:
        return "needs an engine that shows keys"
    if GRANULARITIES.index(needs.uneven) > GRANULARITIES.index(has.uneven):
        return f"needs an engine that keeps a number of rows of its own for every {needs.uneven}"
    return None
