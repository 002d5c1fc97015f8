"""Refuses options that no plan can meet: before anything is counted, with a one-line error."""

from __future__ import annotations

from reprlib import repr as brief

import numpy as np

from edge.backends import engines_with
from edge.backends.base import Backend, Capabilities
from edge.backends.counts import FixedSizes
from edge.devices.host import logical_cores
from edge.errors import InputError, UnsupportedError
from edge.kv import DEFAULT_SINKS, Needs
from edge.kv.policy import check_options
from edge.kv.quest import PAGE
from edge.model.structure.spec import ModelSpec
from edge.options import AUTO, Options
from edge.plan.resolved import Resolved
from edge.types import GRANULARITIES

SMALLEST_ROWS = 256  # below this a chat model cannot follow its own template
_MOST_SEQUENCES = 64
WRITABLE_ROWS = 8  # of the smallest cache, besides pinned and recent rows


def check_request(run: Resolved, *, elsewhere: bool) -> None:
    """Raise InputError for impossible options, UnsupportedError for options that the engine lacks. elsewhere: whether
    the plan is for another device, with other cores."""
    spec, backend, options = run.spec, run.backend, run.options
    has = backend.CAPABILITIES
    if missing := _missing(run.policy.needs, has):
        raise UnsupportedError(
            f"--kv-policy={run.kv_policy} {missing}, and {backend.NAME} is none: use --kv-policy=streaming"
        )
    if options.provider is not None and not has.providers:
        other = engines_with("providers")[0]
        raise UnsupportedError(f"--provider is for the {other} engine, not for {backend.NAME}: use --backend={other}")
    if options.lora and not has.lora:
        others = " or ".join(engines_with("lora"))
        raise UnsupportedError(f"the {backend.NAME} engine runs no LoRA adapters: use --backend={others}")
    if options.prefix_file:
        if options.prefix_file.keys and not has.appends:
            others = " or ".join(engines_with("appends"))
            raise UnsupportedError(
                f"the {backend.NAME} engine takes no --prefix of keys and values: use --backend={others}"
            )
        options.prefix_file.check_model(spec)
    check_count("--sequences", options.sequences, 1, _MOST_SEQUENCES)
    if options.sequences > 1:
        _check_sequences(run)
    _check_draft(run, elsewhere=elsewhere)
    if options.gpu_layers is not None and not has.gpu_layers:
        other = engines_with("gpu_layers")[0]
        raise UnsupportedError(f"--gpu-layers is for the {other} engine, not for {backend.NAME}: use --backend={other}")
    check_gpu_memory(backend, options)
    check_engine(backend, run.kv_dtype, run.threads, elsewhere=elsewhere)
    _check_sinks(run)
    most = backend.most_rows(spec, options.expected_tokens)
    for flag, value, low, high in (
        ("--max-kv-size", run.rows, least_rows(run.pinned), most.rows),
        ("expected_tokens", options.expected_tokens, 1, 1 << 40),
        ("expected_prompt", options.expected_prompt, 1, 1 << 40),
        ("logits_rows", options.logits_rows, 1, 8192),
        ("loras", options.loras, 1, _MOST_SEQUENCES),
        ("--prefill-step-size", run.chunk, 1, 8192),
        ("--gpu-layers", options.gpu_layers, 0, spec.layers + 1),  # the output layer is one more
    ):
        check_count(flag, value, low, high, f" ({most.why})" if high == most.rows else "")
    if spec.encoder and options.prefill_step_size is not None:
        raise InputError("--prefill-step-size: an encoder runs whole texts: state --max-kv-size for shorter ones")
    if has.granularity == "token" and not _keeps_newest(run):
        raise UnsupportedError(
            f"--kv-policy={run.kv_policy} may evict the newest row, from which positions go on in {backend.NAME}: "
            "give recent a larger share"
        )


def _check_sequences(run: Resolved) -> None:
    """Raise UnsupportedError where only one sequence runs at a time."""
    needs, what = run.policy.needs, f"the {run.backend.NAME} engine"
    of = run.backend.one_sequence(run.spec, observes=bool(needs.queries), lora=bool(run.options.lora))
    if run.spec.encoder:
        what, of = "an encoder", ""
    elif needs.reads:
        what, of = f"--kv-policy={run.kv_policy}", ""
    if of is not None:
        raise UnsupportedError(f"{what} runs one sequence at a time{of}: leave --sequences out")


def check_gpu_memory(backend: Backend, options: Options) -> None:
    """Raise UnsupportedError if a budget for a GPU's memory is stated for an engine that uses none."""
    stated = options.gpu_memory is not None and (options.backend, options.provider) != (AUTO, None)
    if stated and not backend.CAPABILITIES.gpu:
        other = engines_with("gpu")[0]
        raise UnsupportedError(f"--gpu-memory is for the {other} engine, not for {backend.NAME}: use --backend={other}")


def _check_draft(run: Resolved, *, elsewhere: bool) -> None:
    """Check the options of a draft model."""
    options, draft = run.options, run.options.draft_file
    if draft is None:
        return
    if options.speculate == "off":
        raise InputError("--draft names a model that drafts, and --speculate=off is without drafts: leave one out")
    verifies = run.backend.CAPABILITIES.verifies and not run.backend.DRAFTS_ASKED
    if (elsewhere and not run.backend.DRAFTS_ELSEWHERE) or not verifies:
        where = "another device" if elsewhere else f"the {run.backend.NAME} engine"
        raise UnsupportedError(f"--draft is for the {engines_with('verifies')[0]} engine here, not for {where}")
    if not run.drafts:
        raise UnsupportedError(f"--kv-policy={run.kv_policy} goes without drafts: leave --draft out")
    if (draft.assists or draft.taps) and options.sequences > 1:
        raise UnsupportedError(f"--draft {draft.file.path.name} drafts for one sequence: leave --sequences out")
    if draft.assists:
        return
    run.backend.check_supported(draft.file, draft.spec)
    if draft.spec.network and any(draft.spec.network.fixed_values):
        raise UnsupportedError(f"--draft {draft.file.path}: a model with recurrent layers cannot take a draft back")


def check_static_sizes(spec: ModelSpec, rows: int | None, chunk: int | None) -> None:
    """Check the sizes of graphs to be written or compiled for this model. Raises InputError."""
    check_count("--max-kv-size", rows, least_rows(0), spec.context, f" ({spec.context} positions is all it knows)")
    check_count("--prefill-step-size", chunk, 2, (rows or spec.context) // 2, " (half of the KV rows)")


def fixed_sizes(options: Options, fixed: FixedSizes) -> tuple[int | None, int, str]:
    """KV rows, prefill step and KV dtype of a run whose graphs have fixed sizes; rows are None if --kv-memory decides.
    Raises InputError for sizes beyond the graphs', UnsupportedError for a KV dtype that they lack."""
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
    chunk = options.prefill_step_size or max(1, min(fixed.chunk, (rows or fixed.rows) // 2))
    return rows, chunk, options.kv_dtype or fixed.kv_dtypes[0]


def check_count(name: str, value: object, low: int = 1, high: int | None = None, why: str = "") -> None:
    """None, or a whole number from `low` to `high`. why: the reason for the upper limit. Raises InputError."""
    if value is None:
        return
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or (high is None and value < low):
        raise InputError(f"{name} must be a whole number, at least {low}, not {brief(value)}")
    if high is not None and not low <= value <= high:
        raise InputError(f"{name} must be from {low} to {high}, not {brief(value)}{why if value > high else ''}")


def check_engine(backend: Backend, kv_dtype: str, threads: int | None, *, elsewhere: bool = False) -> None:
    """What every model asks of an engine, one that hears as well. Raises InputError, UnsupportedError."""
    known = backend.CAPABILITIES.kv_dtypes
    if kv_dtype not in known:
        raise UnsupportedError(f"the {backend.NAME} engine has no KV dtype {kv_dtype!r}: choose {', '.join(known)}")
    if elsewhere:
        check_count("--threads", threads, 1, 1024)
    else:
        check_threads(threads)


def check_threads(threads: int | None) -> None:
    """Raise InputError for more threads than cores: all wait at every barrier, so two on one core slow all down."""
    cores = logical_cores()
    if threads is not None and not 1 <= threads <= cores:
        raise InputError(
            f"--threads must be from 1 to {cores}, the logical cores that edge may use here, not {threads}"
        )


def least_rows(pinned: int) -> int:
    """The least KV rows of a cache: the pinned rows, as many recent ones, and a few to write to."""
    return 2 * pinned + WRITABLE_ROWS


def _check_sinks(run: Resolved) -> None:
    check_options(run.options.sinks)  # of policies without sinks, too
    if run.policy.needs.reads and run.options.sinks > PAGE:
        raise InputError(
            f"--kv-policy={run.kv_policy} reads no more than the first {PAGE} rows for every token: "
            f"--sinks {run.options.sinks} is too many"
        )
    sinks, rows, context = run.pinned, run.rows, run.spec.context
    needed = least_rows(sinks)
    if sinks <= DEFAULT_SINKS:
        return  # blame the cache's size instead
    flag, prefix = "--keep" if sinks == run.options.keep else "--sinks", run.options.prefix_rows
    what, lower = (f"--prefix of {prefix} rows", "") if prefix else (f"{flag} {sinks}", f" or lower {flag}")
    if needed > context:
        most = sinks - (needed - context + 1) // 2
        raise InputError(f"{what} is too many for the {context} positions of the model: at most {most}")
    if rows is not None and rows < needed:
        raise InputError(f"{what} needs at least {needed} KV rows: raise --max-kv-size {rows}{lower}")


def _keeps_newest(run: Resolved) -> bool:
    """Whether the policy keeps the newest row, even in an eviction that leaves only half of the cache."""
    recent = getattr(run.policy, "recent", 1)
    return int(recent * ((run.rows or SMALLEST_ROWS) // 2)) > 0


def _missing(needs: Needs, has: Capabilities) -> str | None:
    """The policy's need that the engine does not meet, in words; None if it meets all."""
    if needs.queries and not has.attention:
        return "needs an engine that shows attention"
    if needs.reads and not has.pages:
        return "needs an engine that chooses the rows it reads"
    if needs.keys and not has.keys:
        return "needs an engine that shows keys"
    if GRANULARITIES.index(needs.uneven) > GRANULARITIES.index(has.uneven):
        return f"needs an engine that keeps a number of rows of its own for every {needs.uneven}"
    return None
