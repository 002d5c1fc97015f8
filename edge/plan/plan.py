"""Count bytes of weights, KV rows and scratch before anything is loaded, and choose a configuration that fits.

A plan takes the first configuration that fits the limit (`edge/plan/candidates.py` orders them). If that configuration
streams weights, its chunk is the one that minimizes the bytes read again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import GPUMemory
from edge.backends.importance import ranking_bytes
from edge.budget import format_bytes
from edge.devices.memory import MemoryLimit, memory_limit, memory_use, release_free_memory
from edge.devices.memory.beyond import bytes_beyond_a_run
from edge.devices.power import memory_root
from edge.errors import BudgetError, InputError, UnsupportedError
from edge.kv import make_policy, pinned_rows
from edge.kv.policy import Policy
from edge.model.adapters.lora_file import LoraSize
from edge.model.structure.spec import ModelSpec
from edge.options import Options
from edge.plan.candidates import EVICTED_SHARE, configurations, read_again, shorter_chunks
from edge.plan.checks import least_rows
from edge.plan.resolve import resolve
from edge.plan.resolved import Resolved
from edge.prompt_cache.tree import BLOCK
from edge.records import dataclass

if TYPE_CHECKING:
    from edge.plan.kv_losses import Losses

_MOST_EVICTED = 256
_MOST_LOST = 0.5  # of the rows that a run needs may be evicted to keep the weights in memory

FirstRun = Callable[[EngineConfig], int]

_log = logging.getLogger("edge")

# Kept free for memory that cannot be counted: the answer's text, allocator slack, the kernel's rounding of VmHWM.
_RESERVE = 6 << 20
_CARD_RESERVE = 512 << 20  # of a card's memory, for its driver's data of each process and for other programs
_GRAIN = 2 << 20  # the interpreter's size is rounded up to this: a budget that fits one run fits the next
_DRIFT = 2 << 20  # by which the next process may be larger, because other pages of libraries are in the page cache

_TOKEN_BYTES = 5  # per token id of a sequence, in an array that grows
DRAFT_TEXT = 1 << 16  # most tokens of a sequence that drafts are copied from
DRAFT_TEXT_BYTES = (4 + 1) * DRAFT_TEXT  # a token id, and a byte per distance: the length of the match
_SAVING = 1  # one more snapshot, while the parts of a new one are joined
_BLOCK_COPIES = 3  # of a prompt cache's block, while its rows are gathered, joined and written, or read and restored


@dataclass(frozen=True)
class PlanBytes:
    """The bytes of a plan's parts."""

    interpreter: int  # measured (this process before load), and the engine's libraries
    weights: int  # resident at a time
    kv: int
    scratch: int
    reserve: int = _RESERVE
    streamed: int = 0  # weights that every pass reads again from the file
    lora: int = 0  # adapters
    fixed_kv: int = 0  # the part of `kv` that does not depend on the number of rows (`KVCache.fixed`)
    gpu: int = 0  # the part of weights, kv, scratch and adapters in buffers of a GPU
    on_card: bool = False  # whether that part is the card's own memory, outside the process
    snapshots: int = 0  # of the ends of turns, to which a conversation can return
    draft: int = 0  # weights, KV rows and scratch of a draft model, or of the model's own layer that drafts
    on_disk: int = 0  # tables that stay in the file, not in `weights`: a token reads a row
    prompts: int = 0  # the part of `scratch` for rows of earlier prompts (`PromptCache.memory`)

    @property
    def total(self) -> int:
        """Bytes of the process."""
        counted = self.interpreter + self.weights + self.kv + self.scratch + self.lora + self.snapshots + self.draft
        return counted - self.gpu * self.on_card


@dataclass(frozen=True)
class Plan:
    """Settings of a run that fits the memory limit, with the bytes of its parts."""

    backend: str
    kv_policy: str
    sinks: int
    config: EngineConfig
    evict_step: int  # rows freed at once when the cache is full
    bytes: PlanBytes
    predicted_peak: int  # an estimate of the process's peak resident set, in bytes
    limit: int
    limit_source: str  # "budget" if stated, else what the system grants
    gpu_limit: int | None = None  # of memory on the GPU, bytes; None: unknown
    gpu_limit_source: str = ""  # as limit_source
    dtype_by: str = ""  # why `--kv-policy auto` chose the KV dtype, unless all rows fit in the engine's own
    chosen: str = ""  # measured speeds of CPU and GPU, if the engine was chosen by them
    first_run: int = 0  # bytes of this process and a child that compiles, before the run; 0: nothing is left to compile
    snapshots: int = 0  # most ends of turns and of parts of prompts to save, where rows alone do not allow a rewind
    tuned: str = "default"  # or "record NAME": the source of threads, chunk and tuned sizes
    draft: EngineConfig | None = None  # of the model or layer that drafts
    rows_by: str = ""  # why rows are evicted, or weights streamed, if the memory has no room for both

    @property
    def policy(self) -> Policy:
        return make_policy(self.kv_policy, self.sinks, keep=self.sinks)

    @property
    def maps_weights(self) -> bool:
        """Whether the weights are mapped pages of a file, rather than a copy."""
        return not (self.bytes.streamed or self.bytes.gpu or self.config.repack)

    def to_dict(self) -> dict[str, Any]:
        """For JSON; sizes in bytes."""
        return asdict(self)


def make_plan(
    spec: ModelSpec,
    backend: Backend,
    options: Options | None = None,
    elsewhere: MemoryLimit | None = None,
    more: int = 0,
    process: int | None = None,
    first_run: FirstRun = lambda config: 0,
    *,
    threads: int | None = None,
    losses: Losses | None = None,
) -> Plan:
    """Choose settings with which `spec` runs within `options.memory`, or within what the system grants.

    elsewhere: the memory of another device to plan for; tuning records of this device are then ignored. threads: of
    that device, unless the options state them. process: bytes that the process holds before the engine is loaded
    (default: this process's now). more: bytes that it will hold besides. first_run: `Backend.first_run` of the model's
    file. losses: see `resolve`.

    Raises BudgetError, which names the smallest budget that fits; InputError for impossible options; UnsupportedError
    for options that the engine lacks.
    """
    options = Options.of(options)
    runs = resolve(spec, backend, options, elsewhere=elsewhere is not None, threads=threads, losses=losses)
    return first_fit(runs, elsewhere, more, process, first_run)


def first_fit(
    runs: Sequence[Resolved], elsewhere: MemoryLimit | None = None, more: int = 0, process: int | None = None,
    first_run: FirstRun = lambda config: 0,
) -> Plan:  # fmt: skip
    """The plan of the first configuration that fits, in the process as it is now. See `make_plan`."""
    options = runs[0].options
    if runs[0].forced and not runs[0].spec.encoder:
        _log.warning("KV policy full, which stops where the cache is full: %s", runs[0].forced)
    budget = MemoryLimit(options.memory, "budget") if options.memory else None
    limit = elsewhere or budget or memory_limit(memory_root())
    card = gpu_limit(options, runs[0].gpu)
    release_free_memory()  # memory freed after building the tokenizer would otherwise count twice
    use, resident, peak = memory_use(), process, 0
    if resident is None:
        resident, peak = use.rss + more - bytes_beyond_a_run(), 0 if elsewhere else use.peak
    before = _Before(resident, peak, first_run)

    def fits(counted: PlanBytes) -> bool:
        return before.needs(counted) <= limit.bytes and (card is None or counted.gpu <= card.bytes)

    lacking = card
    for run in runs:
        fitting = (each for each in before.count([run]) if fits(each[2]))
        for _, config, counted in fitting:
            rows_by = ""
            if config.resident:
                config, counted = _balanced(run, config, limit, before)
                config, counted, rows_by = _streamed_or_evicted(run, config, counted, fitting, limit, before)
            for each in [*_with_drafts(run, config, mtp=elsewhere is None or run.backend.DRAFTS_ELSEWHERE), config]:
                if fits(counted := before.bytes_of(run, each)) and (chosen := _compiled_within(limit, each, before)):
                    return replace(_plan(run, chosen, counted, limit, card, before), rows_by=rows_by)
            lacking = None  # the process has no room to compile, rather than the card
            break  # the others of this run compile the same
    following = replace(before, resident=before.resident + _DRIFT) if process is None else before
    raise _too_small(runs, limit, lacking, before, following, elsewhere=elsewhere is not None)


def gpu_limit(options: Options, gpu: GPUMemory | None) -> MemoryLimit | None:
    """The limit of memory on the GPU: the budget, or the card's free memory less a margin; None: unknown."""
    if options.gpu_memory is not None:
        return MemoryLimit(options.gpu_memory, "budget")
    if gpu is None or gpu.unified or gpu.free is None:
        return None
    return MemoryLimit(max(0, gpu.free - _CARD_RESERVE), "free GPU memory")


def card_limit(card: MemoryLimit) -> str:
    """The limit of `gpu_limit` in the words of an error."""
    what = "--gpu-memory is" if card.source == "budget" else "its free memory, less a margin, is"
    return f"{what} {format_bytes(card.bytes)}"


def plan_with_lora(plan: Plan, spec: ModelSpec, backend: Backend, size: LoraSize) -> Plan:
    """The same plan, with room for other adapters. Raises BudgetError if they do not fit beside the rest."""
    config = replace(plan.config, lora_rank=size.rank, lora_bytes=size.nbytes)
    before, need = backend.footprint(spec, plan.config), backend.footprint(spec, config)
    scratch = plan.bytes.scratch + need.scratch - before.scratch
    counted = replace(plan.bytes, scratch=scratch, lora=need.lora, gpu=need.gpu)
    limits = [(counted.total + counted.reserve, plan.limit, plan.limit_source)]
    if plan.gpu_limit is not None:
        stated = plan.gpu_limit_source == "budget"
        limits.append((counted.gpu, plan.gpu_limit, "--gpu-memory" if stated else plan.gpu_limit_source))
    for needed, limit, source in limits:
        if needed > limit:
            raise BudgetError(
                f"with this adapter the model needs {format_bytes(needed)}, the {source} limit is "
                f"{format_bytes(limit)}: load it with the model (lora=…), so that the plan makes room"
            )
    return replace(
        plan, config=config, bytes=counted, predicted_peak=plan.predicted_peak + counted.total - plan.bytes.total
    )


@dataclass(frozen=True)
class _Before:
    """The process before anything is loaded: its bytes, now and at the peak, and the bytes that a first run takes."""

    resident: int
    peak: int
    first_run: FirstRun

    def count(self, runs: Sequence[Resolved]) -> Iterator[tuple[Resolved, EngineConfig, PlanBytes]]:
        """All configurations of all runs, the best first."""
        for run in runs:
            for config in configurations(run):
                yield run, config, self.bytes_of(run, config)

    def bytes_of(self, run: Resolved, config: EngineConfig) -> PlanBytes:
        need = run.footprint(config)
        scratch, cache = need.scratch, run.options.prompt_cache
        prompts = getattr(cache, "memory", 0)
        if cache is not None or config.sequences > 1:  # sequences copy rows from each other
            block = BLOCK * (need.kv - need.fixed_kv) // config.capacity
            copied = max(block, need.fixed_kv) // config.sequences
            scratch += prompts + _BLOCK_COPIES * copied
        scratch += ranking_bytes(run.spec, run.policy.needs)
        scratch += run.options.prefix_file.nbytes if run.options.prefix_file else 0
        weights = config.resident or need.weights
        # Token ids of prompts that are read before they are run.
        scratch += 4 * (config.capacity + config.chunk) * config.sequences
        if config.sequences > 1:  # each keeps its rows' token ids, in which the next prompt looks for a common prefix
            scratch += _TOKEN_BYTES * config.capacity * config.sequences
        scratch += DRAFT_TEXT_BYTES * config.sequences * (config.drafts > 0)
        reserve = _RESERVE + -self.resident % _GRAIN
        interpreter = self.resident + need.runtime
        on_card = run.gpu is not None and not run.gpu.unified
        return PlanBytes(
            interpreter, weights, need.kv, scratch, reserve, need.streamed, need.lora, need.fixed_kv, need.gpu, on_card,
            draft=run.draft_bytes(config), on_disk=need.on_disk, prompts=prompts,
        )  # fmt: skip

    def needs(self, counted: PlanBytes) -> int:
        """The smallest limit that a configuration fits."""
        return max(counted.total + counted.reserve, self.peak)

    def needs_first(self, config: EngineConfig) -> int:
        """The smallest limit for the work before loading; 0 if there is none."""
        takes = self.first_run(config)
        return self.resident + takes + _RESERVE + -self.resident % _GRAIN if takes else 0


def _plan(
    run: Resolved, config: EngineConfig, counted: PlanBytes, limit: MemoryLimit, card: MemoryLimit | None,
    before: _Before,
) -> Plan:  # fmt: skip
    if config.resident:
        config, counted = _filled(run, config, counted, limit, before)
    snapshots = _snapshots(run, config, counted, limit)
    counted = replace(counted, snapshots=_snapshot_bytes(snapshots, counted.fixed_kv, config))
    return Plan(
        backend=run.backend.NAME,
        kv_policy=run.kv_policy,
        sinks=pinned_rows(run.policy),
        config=config,
        evict_step=max(1, min(config.capacity // EVICTED_SHARE, _MOST_EVICTED)),
        bytes=counted,
        predicted_peak=max(counted.total, before.peak),
        limit=limit.bytes,
        limit_source=limit.source,
        first_run=max(0, before.needs_first(config) - _RESERVE),
        gpu_limit=card.bytes if card and counted.gpu else None,
        gpu_limit_source=card.source if card and counted.gpu else "",
        tuned=run.tuned.about if run.tuned else "default",
        dtype_by=run.dtype_by,
        snapshots=snapshots,
        draft=run.draft_config(config),
    )


def _filled(
    run: Resolved, config: EngineConfig, counted: PlanBytes, limit: MemoryLimit, before: _Before
) -> tuple[EngineConfig, PlanBytes]:
    """The configuration with as many weights in memory as the limit allows, in whole MiB."""
    spare = limit.bytes - counted.total - counted.reserve
    config = replace(config, resident=config.resident + (spare >> 20 << 20))
    return config, before.bytes_of(run, config)


def _balanced(
    run: Resolved, config: EngineConfig, limit: MemoryLimit, before: _Before
) -> tuple[EngineConfig, PlanBytes]:
    """The configuration with the chunk, at most as long, that minimizes the streamed bytes of prompt and answer."""
    found = []
    for each in shorter_chunks(run, config):
        counted = before.bytes_of(run, each)
        _, filled = _filled(run, each, counted, limit, before)
        found.append((read_again(run, each.chunk, filled.streamed), each, counted))
    _, config, counted = min(found, key=lambda each: each[0])
    return config, counted


def _streamed_or_evicted(
    run: Resolved, config: EngineConfig, counted: PlanBytes, others: Iterator[tuple[Resolved, EngineConfig, PlanBytes]],
    limit: MemoryLimit, before: _Before,
) -> tuple[EngineConfig, PlanBytes, str]:  # fmt: skip
    """Of a run whose tokens are known, the better of two configurations, and why: one that keeps all rows and streams
    weights, and the next of `others`, which keeps all weights in memory and evicts rows.

    Streaming reads a share of the weights again with every pass, and takes about that share longer; evicting loses a
    share of what was read. The smaller share wins, as long as half of the rows stay.
    """
    expected = min(run.options.expected_tokens or 0, run.spec.context)
    if not run.fits or config.capacity < expected or not run.policy.evicts:
        return config, counted, ""
    found = next(((smaller, need) for other, smaller, need in others if other is run and not smaller.resident), None)
    if found is None or not 0 < found[0].capacity < expected:
        return config, counted, ""
    smaller, need = found
    _, filled = _filled(run, config, counted, limit, before)
    read, lost = filled.streamed / need.weights, 1 - smaller.capacity / expected
    streaming = f"streaming {format_bytes(filled.streamed)} of weights with every pass ({read:.0%} of them)"
    evicting = f"evicting {expected - smaller.capacity:,} of the {expected:,} rows that this run needs ({lost:.0%})"
    if lost < read and lost <= _MOST_LOST:
        return smaller, need, f"{evicting} instead of {streaming}; --kv-policy=full keeps all rows"
    return config, counted, f"{streaming} instead of {evicting}"


def _with_drafts(run: Resolved, config: EngineConfig, *, mtp: bool) -> Iterator[EngineConfig]:
    """The configuration with the model's layer for multi-token prediction, and with room to verify drafts, best first;
    nothing if it drafts already or cannot. mtp: whether the layer may run."""
    slots = config.resident and run.spec.experts  # several tokens choose, and read, more experts than one
    if config.drafts or slots or not run.drafts:
        return
    more = replace(config, drafts=run.drafts)
    if mtp and run.mtp and not config.resident:
        yield replace(more, mtp=True)
    yield more


def _compiled_within(limit: MemoryLimit, config: EngineConfig, before: _Before) -> EngineConfig | None:
    """The configuration, compiled frugally if nothing else fits the limit; None if that does not fit either."""
    tried = config, replace(config, frugal=True)
    return next((each for each in tried if before.needs_first(each) <= limit.bytes), None)


def _snapshots(run: Resolved, config: EngineConfig, counted: PlanBytes, limit: MemoryLimit) -> int:
    """The number of snapshots that fit beside everything else. 0 for a run of one request, which never rewinds, and for
    policies that use attention, which cannot be restored."""
    if not counted.fixed_kv or run.options.expected_tokens is not None or run.policy.needs.queries:
        return 0
    spare, most = limit.bytes - counted.total - counted.reserve, run.backend.MOST_SNAPSHOTS
    fitting = (n for n in range(most, 0, -1) if _snapshot_bytes(n, counted.fixed_kv, config) <= spare)
    return next(fitting, 0)


def _snapshot_bytes(count: int, size: int, config: EngineConfig) -> int:
    return (count + _SAVING) * size + _TOKEN_BYTES * config.capacity if count else 0


def _too_small(
    runs: Sequence[Resolved], limit: MemoryLimit, card: MemoryLimit | None, before: _Before, following: _Before,
    *, elsewhere: bool,
) -> BudgetError:  # fmt: skip
    """An error that states the need of the options, the smallest budget that fits in the process that tries it, and the
    smallest with the fewest rows."""
    spec, backend, options = runs[0].spec, runs[0].backend, runs[0].options
    _, _, needed = next(before.count(runs))
    smallest, first, config = _smallest(runs, following)
    if card and _smallest(runs, before)[0] <= limit.bytes:
        return _card_too_small(runs, card, before)
    how = f"{config.capacity} KV rows{', weights streamed' if config.resident else ''}"
    stated = "the memory budget is" if limit.source == "budget" else f"the {limit.source} limit is"
    message = (
        f"needs {format_bytes(max(first, needed.total + needed.reserve))}, {stated} {format_bytes(limit.bytes)}: the "
        "smallest that fits is "
    )
    if first > smallest:
        message += f"--memory {first >> 20}MiB in a first run, which compiles or tries the model; later runs fit in "
    message += f"--memory {smallest >> 20}MiB ({how})"
    rows = min(spec.context, max(least_rows(runs[-1].pinned), 2 * (options.prefill_step_size or 0)))
    policy = options.kv_policy if runs[-1].policy.evicts else "streaming"
    fewest = replace(options, max_kv_size=rows, kv_memory=None, kv_policy=policy)
    with suppress(InputError, UnsupportedError):  # a policy that keeps no recent rows when there are few
        found = resolve(spec, backend, fewest, elsewhere=elsewhere, threads=runs[0].threads, losses=runs[0].losses)
        least, _, _ = _smallest(found, following)
        if least < smallest:
            message += f", or --memory {least >> 20}MiB with --max-kv-size {rows}"
            message += f" --kv-policy={policy}" if policy != options.kv_policy else ""
            message += " instead of --kv-memory" if options.kv_memory is not None else ""
    return BudgetError(message, smallest=max(first, smallest))


def _card_too_small(runs: Sequence[Resolved], card: MemoryLimit, before: _Before) -> BudgetError:
    """An error that states the need of the options on the GPU, and the configuration that needs least there."""
    needs = [(counted.gpu, config) for _, config, counted in before.count(runs)]
    least, config = min(needs, key=lambda each: each[0])
    advice = (
        f"the smallest that fits is --gpu-memory {-(-least >> 20)}MiB"
        if card.source == "budget"
        else f"{format_bytes(least)} are the least that fit"
    )
    return BudgetError(
        f"needs {format_bytes(needs[0][0])} of GPU memory, {card_limit(card)}: {advice} "
        f"({config.capacity} KV rows); engines on the CPU need none"
    )


def _smallest(runs: Sequence[Resolved], before: _Before) -> tuple[int, int, EngineConfig]:
    """The smallest budget that a later run fits, that of a first run (0 if there is nothing to compile), both in bytes
    and whole MiB, and the configuration: of the alternative that runs in the smallest budget now."""
    found = []
    for run in runs:
        sizes = [(before.needs(counted), config) for _, config, counted in before.count([run])]
        if not sizes:  # `auto` with all rows, where these do not fit the engine
            continue
        smallest = -(-min(need for need, _ in sizes) >> 20) << 20
        config = next(config for need, config in sizes if need <= smallest)
        first = -(-before.needs_first(replace(config, frugal=True)) >> 20) << 20
        found.append((smallest, first, config))
    return min(found, key=lambda each: max(each[:2]))
