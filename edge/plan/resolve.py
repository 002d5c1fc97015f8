"""Decide the settings that options leave open and that do not depend on counted bytes: policy, KV rows and dtype."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING

from edge.backends.base import Backend
from edge.backends.importance import ranking_bytes
from edge.budget import format_bytes
from edge.errors import InputError, UnsupportedError
from edge.model.structure.spec import ModelSpec
from edge.options import AUTO, Options
from edge.plan.checks import SMALLEST_ROWS, check_request, fixed_sizes, least_rows
from edge.plan.resolved import Resolved

if TYPE_CHECKING:
    from edge.plan.kv_losses import Losses

MOST_KL = 0.01  # nats: the largest loss of a KV dtype for which more rows make up (docs/kv-cache.md)
_KV_ROW_STEP = 16  # --kv-memory is rounded down to a multiple of this number of rows


def resolve(
    spec: ModelSpec, backend: Backend, options: Options, *, elsewhere: bool, threads: int | None = None,
    losses: Losses | None = None,
) -> list[Resolved]:  # fmt: skip
    """The alternatives, best first. elsewhere: whether the run is on another device, for which nothing was tuned here.
    threads: of that device, unless the options state them. losses: of KV dtypes, measured for this model and engine.

    Raises InputError for impossible options, UnsupportedError for options that the engine lacks.
    """
    found = []
    if prefix := options.prefix_rows:
        known = {name: getattr(options, name) for name in ("expected_tokens", "expected_prompt")}
        options = replace(options, **{name: each and each + prefix for name, each in known.items()})
    fixed = backend.fixed_sizes(spec, options.provider, elsewhere=elsewhere)
    rows, chunk, kv_dtype = options.max_kv_size, options.prefill_step_size, options.kv_dtype
    if fixed:
        rows, chunk, kv_dtype = fixed_sizes(options, fixed)
    run = Resolved(
        spec,
        backend,
        options,
        options.kv_policy,
        kv_dtype or backend.CAPABILITIES.kv_dtypes[0],
        rows,
        chunk,
        options.threads if threads is None else options.threads or threads,
        losses=losses or {},
        gpu=None if elsewhere else backend.gpu_memory(),
        emulated=bool(fixed and fixed.emulated),
    )
    for each in _alternatives(run, kv_dtype):
        check_request(each, elsewhere=elsewhere)
        tuned = None if elsewhere else backend.tuned(spec, each.kv_dtype)
        found.append(replace(each, rows=_rows_for_bytes(each), tuned=tuned))
    return found


def _alternatives(run: Resolved, kv_dtype: str | None) -> list[Resolved]:
    """The alternatives of policy and dtype. `auto`: all rows in f16 if they fit beside the weights; else more rows in a
    smaller dtype, evicted by H2O where the engine can: at equal bytes, this measured the least loss (edge eval kv).
    kv_dtype: as stated; None: open. Raises UnsupportedError."""
    if reason := run.backend.keeps_all(run.spec):
        if run.kv_policy in (AUTO, Options.kv_policy):
            return [replace(run, kv_policy="full", forced=reason)]
        if run.kv_policy != "full":
            raise UnsupportedError(f"--kv-policy={run.kv_policy} cannot run this model ({reason}): use full")
    if run.kv_policy != AUTO:
        return [run]
    plain = replace(run, kv_policy="streaming")
    by_heads = run.backend.CAPABILITIES.granularity == "head"
    if kv_dtype is None and run.losses:
        thrifty = _smallest_dtype(plain, rule="int8" if by_heads else None)
    else:
        by = "by rule: not measured on this model" if by_heads and kv_dtype is None else ""
        thrifty = replace(run, kv_dtype=kv_dtype or ("int8" if by_heads else run.kv_dtype), dtype_by=by)
    thrifty = replace(thrifty, kv_policy="h2o" if by_heads else "streaming")
    return [*([replace(plain, whole=True)] if run.options.expected_tokens else []), thrifty]


def _smallest_dtype(run: Resolved, rule: str | None) -> Resolved:
    """The run in the dtype with the smallest rows, among the engine's own, those of a measured loss of at most MOST_KL,
    and `rule` as long as it was not measured."""

    def nbytes(dtype: str) -> int:
        return run.backend.footprint(run.spec, replace(run.config(SMALLEST_ROWS), kv_dtype=dtype)).kv

    fair = [run.kv_dtype, *(dtype for dtype, loss in run.losses.items() if loss.kl <= MOST_KL)]
    said = "; ".join(f"{dtype} {loss}" for dtype, loss in run.losses.items())
    if rule and rule not in run.losses:
        fair.append(rule)
        said += f"; {rule} by rule, not measured"
    by = f"measured on this model, at most {MOST_KL:g} allowed: {said}"
    return replace(run, kv_dtype=min(fair, key=nbytes), dtype_by=by)


def _rows_for_bytes(run: Resolved) -> int | None:
    """`rows`, or the number of rows that --kv-memory has room for. Raises InputError."""
    wanted = run.options.kv_memory
    if wanted is None:
        return run.rows
    if run.rows is not None:
        raise InputError("--max-kv-size and --kv-memory both say how large the KV cache is: state one")

    tables = ranking_bytes(run.spec, run.policy.needs)

    def taken(rows: int) -> int:
        return run.backend.footprint(run.spec, run.config(rows)).kv + tables

    most = run.backend.most_rows(run.spec, run.options.expected_tokens).rows
    least = -(-least_rows(run.pinned) // _KV_ROW_STEP) * _KV_ROW_STEP
    # The largest number of steps that fits: `taken` includes rows of sliding windows and an engine's rounding up.
    steps = bisect_right(range(most // _KV_ROW_STEP + 1), wanted, lo=1, key=lambda each: taken(each * _KV_ROW_STEP)) - 1
    rows = most if taken(most) <= wanted else steps * _KV_ROW_STEP
    if rows < min(most, least):
        raise InputError(f"--kv-memory {format_bytes(wanted)} is too small: {-(-taken(least) // 1024)}KiB are needed")
    return rows
