"""Configurations of an engine that meet the user's options, from the best to the most frugal.

Long prefill chunks are given up first, then KV rows (down to 1,024, unless the run is known to need them), then
repacked weights, then the rest of the rows. Weights that stay in memory are given up last, and where an engine can
stream them. But rows that a run is known to need are worth more than resident weights: without such a row answers
change, without the weights they take longer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import GPUMemory, Tuned
from edge.budget import format_bytes
from edge.devices.host import usable_cores
from edge.errors import InputError, UnsupportedError
from edge.kv import pinned_rows
from edge.model.spec import ModelSpec
from edge.options import AUTO, Options
from edge.plan.checks import SMALLEST_ROWS, check_request, least_rows, pinned, with_fixed_sizes

EVICTED_SHARE = 8  # when the cache is full, 1/8 of it is freed at once: evictions cost, and are rare this way
_CHUNKS = (512, 256, 128, 64, 32, 16)  # prefill steps, best first; llama.cpp gains nothing beyond 512
_ROWS_WORTH_REPACKING = 1024  # fewer rows than this are not traded for faster weights
_STREAMED_CHUNK = 128  # where weights are streamed; the scratch of longer chunks costs more than they save
_ALL_ROWS = 1 << 40
_KV_ROW_STEP = 16  # --kv-memory is rounded down to so many rows


@dataclass(frozen=True)
class Choice:
    """One way to meet the user's options, with all of them checked. options.max_kv_size stands for options.kv_memory.

    tuned: what was found for this device. whole: only with all rows that the run is known to need, and all weights, in
    memory. forced: why the policy is `full` without having been asked for: the engine can evict no rows of this model.
    gpu: that the engine would use here. emulated: `EngineConfig.emulated`.
    """

    spec: ModelSpec
    backend: Backend
    options: Options
    tuned: Tuned | None = None
    whole: bool = False
    forced: str | None = None
    gpu: GPUMemory | None = None
    emulated: bool = False

    @property
    def fits(self) -> bool:
        """Nothing will have to be evicted."""
        expected = self.options.expected_tokens
        return expected is not None and expected <= self.spec.context

    def config(self, rows: int) -> EngineConfig:
        """With so many KV rows, and the shortest of chunks."""
        options, policy = self.options, self.options.policy
        return EngineConfig(
            capacity=rows,
            chunk=1,
            kv_dtype=options.kv_dtype or self.backend.CAPABILITIES.kv_dtypes[0],
            threads=options.threads or usable_cores(),
            logits_rows=options.logits_rows,
            observes=bool(policy.needs.queries),
            per_head=policy.needs.looks,
            uneven=policy.needs.uneven != "token",
            pinned=pinned_rows(policy) if policy.close_gaps else 0,
            provider=options.provider or "cpu",
            emulated=self.emulated,
            gpu_layers=options.gpu_layers or 0,
            adapter=self.gpu.adapter if self.gpu else "",
            lora_rank=options.lora_size.rank,
            lora_bytes=options.lora_size.nbytes,
        )


def find_choices(spec: ModelSpec, backend: Backend, options: Options, *, elsewhere: bool) -> list[Choice]:
    """What to try, best first. elsewhere: on another device, for which nothing was tuned here.

    Raises InputError for impossible options, UnsupportedError for what the engine lacks.
    """
    choices = []
    fixed = backend.fixed_sizes(spec, options.provider, elsewhere=elsewhere)
    options = with_fixed_sizes(options, fixed) if fixed else options
    gpu = None if elsewhere else backend.gpu_memory()
    for choice in _alternatives(spec, backend, options):
        check_request(spec, backend, choice.options, elsewhere=elsewhere)
        choice = replace(choice, options=_rows_for_bytes(choice), gpu=gpu, emulated=bool(fixed and fixed.emulated))
        kv_dtype = choice.options.kv_dtype or backend.CAPABILITIES.kv_dtypes[0]
        tuned = None if elsewhere else backend.tuned(spec, kv_dtype)
        choices.append(replace(choice, tuned=tuned))
    return choices


def configurations(choice: Choice) -> Iterator[EngineConfig]:
    """Those of a choice, from the best to the most frugal."""
    for config in _candidates(choice):
        wanted = min(choice.options.expected_tokens or 0, _rows_read(choice))
        if not choice.whole or (not config.resident and config.capacity >= wanted):
            yield config


def _alternatives(spec: ModelSpec, backend: Backend, options: Options) -> list[Choice]:
    """Automatic: rows in f16 as long as all fit beside the weights. Else, where the engine can, twice as many in int8,
    chosen by H2O: of what was measured at equal bytes (edge eval kv), this loses least."""
    if reason := backend.keeps_all(spec):
        if options.kv_policy in (AUTO, Options.kv_policy):
            return [Choice(spec, backend, replace(options, kv_policy="full"), forced=reason)]
        if options.kv_policy != "full":
            raise UnsupportedError(f"--kv-policy={options.kv_policy} cannot run this model ({reason}): use full")
    if options.kv_policy != AUTO:
        return [Choice(spec, backend, options)]
    plain = Choice(spec, backend, replace(options, kv_policy="streaming"))
    if backend.CAPABILITIES.granularity != "head":
        return [plain]
    thrifty = Choice(spec, backend, replace(options, kv_policy="h2o", kv_dtype=options.kv_dtype or "int8"))
    return [*([replace(plain, whole=True)] if options.expected_tokens else []), thrifty]


def _rows_for_bytes(choice: Choice) -> Options:
    """`kv_memory` as `max_kv_size`."""
    options, wanted = choice.options, choice.options.kv_memory
    if wanted is None:
        return options
    if options.max_kv_size is not None:
        raise InputError("--max-kv-size and --kv-memory both say how large the KV cache is: state one")

    def taken(rows: int) -> int:
        return choice.backend.footprint(choice.spec, choice.config(rows)).kv

    most = choice.backend.most_rows(choice.spec, options.expected_tokens).rows
    least = -(-least_rows(pinned(options)) // _KV_ROW_STEP) * _KV_ROW_STEP
    # The last number of steps that fits: rows of sliding windows, and those that an engine rounds up, are in `taken`.
    steps = bisect_right(range(most // _KV_ROW_STEP + 1), wanted, lo=1, key=lambda each: taken(each * _KV_ROW_STEP)) - 1
    rows = most if taken(most) <= wanted else steps * _KV_ROW_STEP
    if rows < min(most, least):
        raise InputError(f"--kv-memory {format_bytes(wanted)} is too small: {-(-taken(least) // 1024)}KiB are needed")
    return replace(options, max_kv_size=rows, kv_memory=None)


def _rows_read(choice: Choice) -> int:
    """More rows change nothing: a policy that evicts leaves at least a window's, and no layer reads older ones. Of
    models with windows in all layers; others read all rows."""
    spec, options = choice.spec, choice.options
    windows = spec.network.windows if spec.network else ()
    if not windows or not all(windows) or not options.policy.evicts:
        return _ALL_ROWS
    recent = max(windows) + pinned(options)
    rows = max(-(-recent * EVICTED_SHARE // (EVICTED_SHARE - 1)), recent + (options.prefill_step_size or 0))
    return -(-rows // SMALLEST_ROWS) * SMALLEST_ROWS


def _candidates(choice: Choice) -> Iterator[EngineConfig]:
    """What the user fixed goes before what was tuned. Those that stream weights keep the least of them in memory."""
    spec, backend, options, tuned = choice.spec, choice.backend, choice.options, choice.tuned
    # Heads that evict on their own close gaps only when positions reach the context, which takes a second or so: a
    # cache that leaves half of it free does so every few thousand tokens.
    limit = backend.most_rows(spec, options.expected_tokens).rows
    most = min(limit, max(1, spec.context // 2)) if options.policy.needs.looks and not choice.fits else limit
    expected = -(-(options.expected_tokens or spec.context) // SMALLEST_ROWS) * SMALLEST_ROWS
    smallest = min(limit, max(SMALLEST_ROWS, least_rows(pinned(options)), 2 * (options.prefill_step_size or 0)))
    wanted = options.max_kv_size or max(min(most, expected, _rows_read(choice)), smallest)
    unpressed = options.kv_policy == "full" and not choice.forced
    least = wanted if options.max_kv_size or unpressed else min(wanted, smallest)
    base, chunk = choice.config(wanted), _CHUNKS[0]
    if tuned:
        threads = options.threads or min(base.threads, tuned.threads or base.threads)
        base, chunk = replace(base, threads=threads, tuning=tuned.values), tuned.chunk or chunk
    if backend.can_repack(spec):
        floor = wanted if options.expected_tokens else max(least, min(wanted, _ROWS_WORTH_REPACKING))
        yield from _sizes(replace(base, repack=True), options, floor, chunk)
    if choice.fits:
        yield from _sizes(base, options, wanted, chunk)
        yield from _streamed(choice, base, chunk)
    yield from _sizes(base, options, least, chunk)
    yield from _streamed(choice, replace(base, capacity=least), chunk)


def _streamed(choice: Choice, base: EngineConfig, longest: int) -> Iterator[EngineConfig]:
    """With as many rows, and the fewest possible weights in memory; none if the engine cannot."""
    for config in _sizes(base, choice.options, base.capacity, min(longest, _STREAMED_CHUNK)):
        if resident := choice.backend.footprint(choice.spec, config).least_weights:
            yield replace(config, resident=resident)


def _sizes(base: EngineConfig, options: Options, least: int, longest: int) -> Iterator[EngineConfig]:
    """Fewer and fewer rows; for each, shorter and shorter prefill chunks."""
    rows = base.capacity
    while True:
        for chunk in _chunks(rows, options, longest):
            yield replace(base, capacity=rows, chunk=chunk, logits_rows=min(base.logits_rows, chunk))
        if rows <= least:
            return
        rows = max(least, min(rows - SMALLEST_ROWS, int(rows * 0.9) // SMALLEST_ROWS * SMALLEST_ROWS))


def _chunks(rows: int, options: Options, longest: int) -> list[int]:
    """Prefill steps worth trying, `longest` first. A chunk that evicts must leave most of the window in place."""
    evicts = options.policy.evicts and (options.expected_tokens or rows + 1) > rows
    if options.prefill_step_size:
        most = max(1, rows // 2) if evicts else rows
        if options.prefill_step_size > most:
            raise InputError(
                f"--prefill-step-size {options.prefill_step_size} is too long for {rows} KV rows: at most {most}"
            )
        return [options.prefill_step_size]
    most = max(1, rows // EVICTED_SHARE) if evicts else rows
    tried = [longest, *(chunk for chunk in _CHUNKS if chunk < longest)]
    return [chunk for chunk in tried if chunk <= most] or [most]
