"""What fits: bytes of weights, KV rows and scratch, counted before anything is loaded.

A plan tries configurations from the best to the most frugal and takes the first that fits the limit. Long prefill
chunks are given up first, then KV rows (down to 1,024, unless the run is known to need them), then repacked weights,
then the rest of the rows. Weights that stay in memory are given up last, and where an engine can stream them. But rows
that a run is known to need are worth more than they: without such a row answers change, without the weights they take
longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from edge.backends.base import Backend, Capabilities, EngineConfig, Tuned
from edge.budget import Budget, format_bytes, parse_bytes
from edge.devices.host import logical_cores, usable_cores
from edge.devices.memory import MemoryLimit, memory_limit, memory_use, release_free_memory
from edge.devices.power import memory_root
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.kv import DEFAULT_SINKS, Needs, Policy, make_policy, pinned_rows
from edge.kv.policy import check_options
from edge.model.spec import ModelSpec
from edge.prompt_cache.tree import BLOCK
from edge.run.arguments import check_count
from edge.types import GRANULARITIES

_CHUNKS = (512, 256, 128, 64, 32, 16)  # prefill steps, best first; llama.cpp gains nothing beyond 512
SMALLEST_ROWS = 256  # below this a chat model cannot follow its own template
_ROWS_WORTH_REPACKING = 1024  # fewer rows than this are not traded for faster weights
_STREAMED_CHUNK = 128  # where weights are streamed; the scratch of longer chunks costs more than they save
_EVICTED_SHARE = 8  # when the cache is full, 1/8 of it is freed at once: evictions cost, and are rare this way
_MOST_EVICTED = 256

# Kept free for what cannot be counted: the answer's text, allocator slack, the kernel's own rounding of VmHWM.
_RESERVE = 6 << 20
_GRAIN = 2 << 20  # the interpreter counts as a multiple of this: a budget that fits in one run fits in the next

_BLOCK_COPIES = 3  # of a prompt cache's block, while its rows are gathered, joined and written, or read and put back
_KV_ROW_STEP = 16  # --kv-memory is rounded down to so many rows
AUTO = "auto"


@dataclass(frozen=True)
class PlanRequest:
    """What the user fixed; `None` leaves the choice to the plan.

    keep: first rows that no policy evicts, as it evicts no sinks: those of a system prompt (`Model.system_rows`).
    max_kv_size: rows. kv_memory: bytes of rows ("12MiB"), instead. expected_tokens: prompt and answer, if known.
    prompt_cache: bytes that a prompt cache may hold in memory; None: there is none. provider: ONNX Runtime's.
    """

    kv_policy: str = "streaming"
    sinks: int = DEFAULT_SINKS
    keep: int = 0
    max_kv_size: int | None = None
    kv_memory: str | int | None = None
    kv_dtype: str | None = None
    prefill_step_size: int | None = None
    threads: int | None = None
    expected_tokens: int | None = None
    logits_rows: int = 1
    prompt_cache: int | None = None
    provider: str | None = None


@dataclass(frozen=True)
class PlanBytes:
    """The table of bytes. interpreter: measured (this process before load) plus the engine's libraries.

    weights: those that are resident at a time. streamed: those that every pass reads anew from the file.
    """

    interpreter: int
    weights: int
    kv: int
    scratch: int
    reserve: int = _RESERVE
    streamed: int = 0

    @property
    def total(self) -> int:
        return self.interpreter + self.weights + self.kv + self.scratch


@dataclass(frozen=True)
class Plan:
    """A run that fits. `predicted_peak` is an estimate of the process's peak resident set, in bytes."""

    backend: str
    kv_policy: str
    sinks: int
    config: EngineConfig
    evict_step: int  # rows freed at once when the cache is full
    bytes: PlanBytes
    predicted_peak: int
    limit: int
    limit_source: str  # "budget" if stated, else what the system grants
    tuned: str = "default"  # or "record NAME": where threads, chunk and sizes of pieces of work come from

    def to_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return asdict(self)


def make_plan(
    spec: ModelSpec,
    backend: Backend,
    request: PlanRequest | None = None,
    budget: Budget | None = None,
    elsewhere: MemoryLimit | None = None,
) -> Plan:
    """Choose how to run `spec` within `budget`, or within what the system grants. elsewhere: the memory of another
    device, if the plan is for that one: then nothing counts that was tuned on this.

    Raises BudgetError, naming the smallest budget that would do; InputError for impossible requests;
    UnsupportedError for what the engine lacks.
    """
    request, budget = request or PlanRequest(), budget or Budget()
    choices = [_checked(spec, backend, each, elsewhere) for each in _alternatives(spec, backend, request)]
    limit = MemoryLimit(budget.memory, "budget") if budget.memory else elsewhere or memory_limit(memory_root())
    release_free_memory()  # what building the tokenizer left behind would otherwise be counted twice
    use = memory_use()
    peak = 0 if elsewhere else use.peak
    for choice in choices:
        for config, counted in _counted(spec, backend, choice, use.rss):
            if max(counted.total + counted.reserve, peak) <= limit.bytes:
                return _plan(spec, backend, choice, config, counted, limit, use.rss, peak)
    raise _too_small(spec, backend, request, choices, limit, elsewhere, use.rss, peak)


@dataclass(frozen=True)
class _Choice:
    """One way to meet a request, with its options checked. whole: only with all rows that the run is known to need,
    and all weights, in memory."""

    request: PlanRequest
    tuned: Tuned | None
    whole: bool = False


def _alternatives(spec: ModelSpec, backend: Backend, request: PlanRequest) -> list[_Choice]:
    """What to try, best first. Automatic: rows in f16 as long as all fit beside the weights. Else, where the engine
    can, twice as many in int8, chosen by H2O: of what was measured at equal bytes (edge eval kv), this loses least."""
    if request.kv_policy != AUTO:
        return [_Choice(request, None)]
    plain = replace(request, kv_policy="streaming")
    if backend.CAPABILITIES.granularity != "head":
        return [_Choice(plain, None)]
    thrifty = replace(request, kv_policy="h2o", kv_dtype=request.kv_dtype or "int8")
    return [*([_Choice(plain, None, whole=True)] if request.expected_tokens else []), _Choice(thrifty, None)]


def _checked(spec: ModelSpec, backend: Backend, choice: _Choice, elsewhere: MemoryLimit | None) -> _Choice:
    """With the rows of `kv_memory`, and what was tuned on this device. Raises InputError and UnsupportedError."""
    _check(spec, backend, choice.request, elsewhere=elsewhere is not None)
    request = _rows_for_bytes(spec, backend, choice.request)
    kv_dtype = request.kv_dtype or backend.CAPABILITIES.kv_dtypes[0]
    return replace(choice, request=request, tuned=None if elsewhere else backend.tuned(spec, kv_dtype))


def _counted(
    spec: ModelSpec, backend: Backend, choice: _Choice, resident: int
) -> Iterator[tuple[EngineConfig, PlanBytes]]:
    """The configurations of a choice, from the best to the most frugal, and what each takes."""
    for config in _candidates(spec, backend, choice.request, choice.tuned):
        if choice.whole and (config.resident or config.capacity < (choice.request.expected_tokens or 0)):
            continue
        yield config, _count(spec, backend, choice.request, config, resident)


def _plan(
    spec: ModelSpec, backend: Backend, choice: _Choice, config: EngineConfig, counted: PlanBytes, limit: MemoryLimit,
    resident: int, peak: int,
) -> Plan:  # fmt: skip
    request, tuned = choice.request, choice.tuned
    if config.resident:
        spare = limit.bytes - counted.total - counted.reserve
        config = replace(config, resident=config.resident + (spare >> 20 << 20))
        counted = _count(spec, backend, request, config, resident)
    return Plan(
        backend=backend.NAME,
        kv_policy=request.kv_policy,
        sinks=pinned_rows(_policy(request)),
        config=config,
        evict_step=_evict_step(config.capacity),
        bytes=counted,
        predicted_peak=max(counted.total, peak),
        limit=limit.bytes,
        limit_source=limit.source,
        tuned=tuned.about if tuned else "default",
    )


def _rows_for_bytes(spec: ModelSpec, backend: Backend, request: PlanRequest) -> PlanRequest:
    """`kv_memory` as `max_kv_size`."""
    if request.kv_memory is None:
        return request
    if request.max_kv_size is not None:
        raise InputError("--max-kv-size and --kv-memory both say how large the KV cache is: state one")

    def taken(rows: int) -> int:
        return backend.footprint(spec, _config(backend, request, rows)).kv

    wanted, most = parse_bytes(request.kv_memory, "--kv-memory"), backend.most_rows(spec, request.expected_tokens).rows
    rows = min(most, wanted // (taken(1024) // 1024) // _KV_ROW_STEP * _KV_ROW_STEP)
    least = -(-_least_rows(request) // _KV_ROW_STEP) * _KV_ROW_STEP
    while rows >= least and taken(rows) > wanted:  # llama.cpp allocates rows by the hundred
        rows -= _KV_ROW_STEP
    if rows < min(most, least):
        raise InputError(f"--kv-memory {format_bytes(wanted)} is too small: {-(-taken(least) // 1024)}KiB are needed")
    return replace(request, max_kv_size=rows, kv_memory=None)


def _config(backend: Backend, request: PlanRequest, rows: int) -> EngineConfig:
    policy = _policy(request)
    needs = policy.needs
    return EngineConfig(
        capacity=rows,
        chunk=1,
        kv_dtype=request.kv_dtype or backend.CAPABILITIES.kv_dtypes[0],
        threads=request.threads or usable_cores(),
        logits_rows=request.logits_rows,
        observes=bool(needs.queries),
        per_head=needs.looks,
        uneven=needs.uneven != "token",
        pinned=pinned_rows(policy) if policy.close_gaps else 0,
        provider=request.provider or "cpu",
    )


def _check(spec: ModelSpec, backend: Backend, request: PlanRequest, *, elsewhere: bool) -> None:
    has = backend.CAPABILITIES
    if missing := _missing(_policy(request).needs, has):
        raise UnsupportedError(
            f"--kv-policy {request.kv_policy} {missing}, and {backend.NAME} is none: use --kv-policy streaming"
        )
    if request.provider is not None and backend.NAME != "onnx":
        raise UnsupportedError(f"--provider is for the onnx engine, not for {backend.NAME}: use --backend onnx")
    if request.kv_dtype is not None and request.kv_dtype not in has.kv_dtypes:
        raise UnsupportedError(
            f"the {backend.NAME} engine has no KV dtype {request.kv_dtype!r}: choose {', '.join(has.kv_dtypes)}"
        )
    _check_sinks(spec, request)
    most = backend.most_rows(spec, request.expected_tokens)
    for flag, value, low, high in (
        ("--max-kv-size", request.max_kv_size, _least_rows(request), most.rows),
        ("expected_tokens", request.expected_tokens, 1, 1 << 40),
        ("logits_rows", request.logits_rows, 1, 8192),
        ("--prefill-step-size", request.prefill_step_size, 1, 8192),
        ("--threads", request.threads, 1, 1024),
    ):
        check_count(flag, value, low, high, f" ({most.why})" if high == most.rows else "")
    if not elsewhere:
        check_threads(request.threads)
    if has.granularity == "token" and not _keeps_newest(request):
        raise UnsupportedError(
            f"--kv-policy {request.kv_policy} may evict the newest row, from which positions go on in {backend.NAME}: "
            "give recent a larger share"
        )


def check_threads(threads: int | None) -> None:
    """Threads that wait for each other at every barrier hardly get on when they share a core. Raises InputError."""
    cores = logical_cores()
    if threads is not None and not 1 <= threads <= cores:
        raise InputError(
            f"--threads must be from 1 to {cores}, the logical cores that edge may use here, not {threads}"
        )


def _check_sinks(spec: ModelSpec, request: PlanRequest) -> None:
    check_options(request.sinks)  # of policies without sinks, too
    sinks, needed, rows = _pinned(request), _least_rows(request), request.max_kv_size
    if sinks <= DEFAULT_SINKS:
        return  # of too small a cache its rows are the fault
    flag = "--keep" if sinks == request.keep else "--sinks"
    if needed > spec.context:
        most = sinks - (needed - spec.context + 1) // 2
        raise InputError(f"{flag} {sinks} is too many for the {spec.context} positions of the model: at most {most}")
    if rows is not None and rows < needed:
        raise InputError(f"{flag} {sinks} needs at least {needed} KV rows: raise --max-kv-size {rows} or lower {flag}")


def _keeps_newest(request: PlanRequest) -> bool:
    """However few rows an eviction leaves: half of the cache at least."""
    recent = getattr(_policy(request), "recent", 1)
    return int(recent * ((request.max_kv_size or SMALLEST_ROWS) // 2)) > 0


def _missing(needs: Needs, has: Capabilities) -> str | None:
    """What a policy wants of an engine and does not get."""
    if needs.queries and not has.attention:
        return "needs an engine that shows attention"
    if needs.keys and not has.keys:
        return "needs an engine that shows keys"
    if GRANULARITIES.index(needs.uneven) > GRANULARITIES.index(has.uneven):
        return f"needs an engine that keeps a number of rows of its own for every {needs.uneven}"
    return None


def _candidates(spec: ModelSpec, backend: Backend, request: PlanRequest, tuned: Tuned | None) -> Iterator[EngineConfig]:
    """Configurations from the best to the most frugal. What the user fixed goes before what was tuned.

    Those that stream weights keep the least of them in memory.
    """
    per_head = _policy(request).needs.looks
    # Heads that evict on their own close gaps only when positions reach the context, which takes a second or so: a
    # cache that leaves half of it free does so every few thousand tokens.
    limit = backend.most_rows(spec, request.expected_tokens).rows
    most = min(limit, max(1, spec.context // 2)) if per_head and not _fits(spec, request) else limit
    wanted = request.max_kv_size or min(most, _round_up(request.expected_tokens or spec.context))
    smallest = min(limit, max(SMALLEST_ROWS, _least_rows(request), 2 * (request.prefill_step_size or 0)))
    wanted = request.max_kv_size or max(wanted, smallest)
    least = wanted if request.max_kv_size or request.kv_policy == "full" else min(wanted, smallest)
    base = _config(backend, request, wanted)
    if tuned:
        threads = request.threads or min(base.threads, tuned.threads or base.threads)
        base = replace(base, threads=threads, tuning=tuned.values)
    chunk = (tuned and tuned.chunk) or _CHUNKS[0]
    if backend.can_repack(spec):
        floor = wanted if request.expected_tokens else max(least, min(wanted, _ROWS_WORTH_REPACKING))
        yield from _sizes(replace(base, repack=True), request, floor, chunk)
    if _fits(spec, request):
        yield from _sizes(base, request, wanted, chunk)
        yield from _streamed(spec, backend, base, request, chunk)
    yield from _sizes(base, request, least, chunk)
    yield from _streamed(spec, backend, replace(base, capacity=least), request, chunk)


def _streamed(
    spec: ModelSpec, backend: Backend, base: EngineConfig, request: PlanRequest, longest: int
) -> Iterator[EngineConfig]:
    """With as many rows, and as few weights in memory as may be; none if the engine cannot."""
    for config in _sizes(base, request, base.capacity, min(longest, _STREAMED_CHUNK)):
        if resident := backend.footprint(spec, config).least_weights:
            yield replace(config, resident=resident)


def _fits(spec: ModelSpec, request: PlanRequest) -> bool:
    """Nothing will have to be evicted."""
    return request.expected_tokens is not None and request.expected_tokens <= spec.context


def _sizes(base: EngineConfig, request: PlanRequest, least: int, longest: int) -> Iterator[EngineConfig]:
    """Fewer and fewer rows; for each, shorter and shorter prefill chunks."""
    rows = base.capacity
    while True:
        for chunk in _chunks(rows, request, longest):
            yield replace(base, capacity=rows, chunk=chunk, logits_rows=min(base.logits_rows, chunk))
        if rows <= least:
            return
        rows = max(least, min(rows - SMALLEST_ROWS, int(rows * 0.9) // SMALLEST_ROWS * SMALLEST_ROWS))


def _chunks(rows: int, request: PlanRequest, longest: int) -> list[int]:
    """Prefill steps worth trying, `longest` first. A chunk that evicts must leave most of the window in place."""
    evicts = make_policy(request.kv_policy).evicts and (request.expected_tokens or rows + 1) > rows
    if request.prefill_step_size:
        most = max(1, rows // 2) if evicts else rows
        if request.prefill_step_size > most:
            raise InputError(
                f"--prefill-step-size {request.prefill_step_size} is too long for {rows} KV rows: at most {most}"
            )
        return [request.prefill_step_size]
    most = max(1, rows // _EVICTED_SHARE) if evicts else rows
    tried = [longest, *(chunk for chunk in _CHUNKS if chunk < longest)]
    return [chunk for chunk in tried if chunk <= most] or [most]


def _count(spec: ModelSpec, backend: Backend, request: PlanRequest, config: EngineConfig, resident: int) -> PlanBytes:
    need = backend.footprint(spec, config)
    scratch = need.scratch
    if request.prompt_cache is not None:
        scratch += request.prompt_cache + _BLOCK_COPIES * BLOCK * need.kv // config.capacity
    weights = config.resident or need.weights
    scratch += 4 * (config.capacity + config.chunk)  # token ids of a prompt that are read before they are run
    reserve = _RESERVE + -resident % _GRAIN
    return PlanBytes(resident + need.runtime, weights, need.kv, scratch, reserve, need.streamed)


def _too_small(
    spec: ModelSpec, backend: Backend, request: PlanRequest, choices: list[_Choice], limit: MemoryLimit,
    elsewhere: MemoryLimit | None, resident: int, peak: int,
) -> BudgetError:  # fmt: skip
    """Say what the request needs, the smallest budget that it fits, and the smallest with the fewest rows."""
    needed = next(counted for choice in choices for _, counted in _counted(spec, backend, choice, resident))
    smallest, config = _smallest(spec, backend, choices, resident, peak)
    how = f"{config.capacity} KV rows{', weights streamed' if config.resident else ''}"
    stated = "the memory budget is" if limit.source == "budget" else f"the {limit.source} limit is"
    message = (
        f"needs {format_bytes(needed.total + needed.reserve)}, {stated} {format_bytes(limit.bytes)}: the smallest that "
        f"fits is --memory {smallest >> 20}MiB ({how})"
    )
    rows = min(spec.context, max(_least_rows(choices[-1].request), 2 * (request.prefill_step_size or 0)))
    policy = "streaming" if request.kv_policy == "full" else request.kv_policy
    fewest = replace(request, max_kv_size=rows, kv_memory=None, kv_policy=policy)
    with suppress(InputError, UnsupportedError):  # a policy that keeps no recent rows when there are few
        others = [_checked(spec, backend, each, elsewhere) for each in _alternatives(spec, backend, fewest)]
        least, _ = _smallest(spec, backend, others, resident, peak)
        if least < smallest:
            message += f", or --memory {least >> 20}MiB with --max-kv-size {rows}"
            message += f" --kv-policy {policy}" if policy != request.kv_policy else ""
            message += " instead of --kv-memory" if request.kv_memory is not None else ""
    return BudgetError(message, smallest=smallest)


def _smallest(
    spec: ModelSpec, backend: Backend, choices: list[_Choice], resident: int, peak: int
) -> tuple[int, EngineConfig]:
    """The smallest budget that one of the choices fits, bytes, in whole MiB as people write them; and the plan's choice
    within it."""
    found = [each for choice in choices for each in _counted(spec, backend, choice, resident)]
    needs = [max(counted.total + counted.reserve, peak) for _, counted in found]
    smallest = -(-min(needs) >> 20) << 20
    return smallest, next(config for need, (config, _) in zip(needs, found, strict=True) if need <= smallest)


def _evict_step(rows: int) -> int:
    return max(1, min(rows // _EVICTED_SHARE, _MOST_EVICTED))


def _round_up(rows: int) -> int:
    return -(-rows // SMALLEST_ROWS) * SMALLEST_ROWS


def _least_rows(request: PlanRequest) -> int:
    return least_rows(_pinned(request))


def _pinned(request: PlanRequest) -> int:
    """Rows that stay; of a policy that evicts none, as many as its cache must have room for."""
    policy = _policy(request)
    return pinned_rows(policy) if policy.evicts else request.sinks


def least_rows(pinned: int) -> int:
    """The pinned rows, as many recent ones, and a few to write to."""
    return 2 * pinned + 8


def _policy(request: PlanRequest) -> Policy:
    return make_policy(request.kv_policy, request.sinks, request.keep)
