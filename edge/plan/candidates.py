"""Configurations of an engine that meet the user's options, from the best to the most frugal.

Configurations first give up long prefill chunks, then KV rows (down to 1,024, unless the run is known to need them),
then repacked weights, then the rest of the rows, and last, where the engine can stream, resident weights. A few percent
of the rows go before chunks that make prompts slow: such chunks save little more memory. But rows that
a run is known to need come before resident weights: without such a row answers change, without the weights they take
longer. `plan.py` compares the two where both are possible.

Every chunk of the prompt and every token of the answer reads streamed weights again. Long chunks mean fewer passes, but
their scratch displaces weights, so that each pass reads more: a plan minimizes `read_again`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from edge.backends.base import EngineConfig
from edge.errors import InputError
from edge.plan.checks import SMALLEST_ROWS, least_rows
from edge.plan.resolved import Resolved

EVICTED_SHARE = 8  # an eviction frees 1/8 of a full cache, so that evictions, which cost time, are rare
_CHUNKS = (512, 256, 128, 64, 32, 16)  # prefill steps, best first; llama.cpp gains nothing beyond 512
_SHORT = 32  # prompts take a fifth longer than with 512, with 16 half (SmolLM2 on a Raspberry Pi 5, estimated)
_FEW = 8  # at most 1/8 of the rows go to keep a chunk from being short
_ROWS_WORTH_REPACKING = 1024  # fewer rows than this are not traded for faster weights
_STREAMED_SHARE = 4  # a chunk may evict 1/4 of the rows where every chunk reads streamed weights again
_PROMPT_SHARE = 8  # assumed prompt tokens per answer token, at least: few answers reach their limit
_ALL_ROWS = 1 << 40


def configurations(run: Resolved) -> Iterator[EngineConfig]:
    """The configurations to try, from the best to the most frugal."""
    for config in _candidates(run):
        wanted = min(run.options.expected_tokens or 0, _rows_read(run))
        if not run.whole or (not config.resident and config.capacity >= wanted):
            yield config


def _rows_read(run: Resolved) -> int:
    """The most KV rows that can matter: if all layers have windows, those of a window and of an eviction; otherwise
    all."""
    windows = run.spec.network.windows if run.spec.network else ()
    if not windows or not all(windows) or not run.policy.evicts:
        return _ALL_ROWS
    recent = max(windows) + run.pinned
    rows = max(-(-recent * EVICTED_SHARE // (EVICTED_SHARE - 1)), recent + (run.chunk or 0))
    return -(-rows // SMALLEST_ROWS) * SMALLEST_ROWS


def _candidates(run: Resolved) -> Iterator[EngineConfig]:
    """All candidates, best first. Stated settings override tuned ones. Configurations that stream keep the fewest
    weights in memory."""
    spec, backend, tuned, known = run.spec, run.backend, run.tuned, run.options.expected_tokens
    # Per-head eviction closes gaps only when positions reach the context, which takes a second or so: a cache that
    # leaves half of the context free does so every few thousand tokens.
    limit = backend.most_rows(spec, known).rows
    most = min(limit, max(1, spec.context // 2)) if run.policy.needs.looks and not run.fits else limit
    expected = -(-(known or spec.context) // SMALLEST_ROWS) * SMALLEST_ROWS
    smallest = min(limit, max(SMALLEST_ROWS, least_rows(run.pinned), 2 * (run.chunk or 0)))
    wanted = run.rows or max(min(most, expected, _rows_read(run)), smallest)
    unpressed = not run.policy.evicts and not run.forced
    least = wanted if run.rows or unpressed else min(wanted, smallest)
    base, longest = run.config(wanted), _CHUNKS[0]
    if tuned:
        threads = run.threads or min(base.threads, tuned.threads or base.threads)
        base, longest = replace(base, threads=threads, tuning=tuned.values), tuned.chunk or longest
    if backend.can_repack(spec):
        floor = wanted if known else max(least, min(wanted, _ROWS_WORTH_REPACKING))
        yield from _sizes(run, replace(base, repack=True), floor, longest)
    if run.fits:
        yield from _sizes(run, base, wanted, longest)
        yield from _streamed(run, base, longest)
    yield from _sizes(run, base, least, longest)
    yield from _streamed(run, replace(base, capacity=least), longest)


def _streamed(run: Resolved, base: EngineConfig, longest: int) -> Iterator[EngineConfig]:
    """Configurations with as many rows, and the fewest possible weights in memory; none if the engine cannot stream."""
    for config in _sizes(run, base, base.capacity, longest, _STREAMED_SHARE):
        if resident := run.footprint(config).least_weights:
            yield replace(config, resident=resident)


def shorter_chunks(run: Resolved, config: EngineConfig) -> Iterator[EngineConfig]:
    """The configuration, and variants with shorter chunks unless the user stated one."""
    yield config
    for chunk in _CHUNKS if run.chunk is None else ():
        if chunk < config.chunk:
            yield replace(config, chunk=chunk, logits_rows=min(config.logits_rows, chunk))


def read_again(run: Resolved, chunk: int, streamed: int) -> float:
    """Bytes that a prompt and its answer read, if each pass reads `streamed` bytes again; for a prompt of unknown
    length, per token of the answer."""
    prompt, expected = run.options.expected_prompt, run.options.expected_tokens
    if prompt is None:
        return streamed * (1 + _PROMPT_SHARE / chunk)
    answer = prompt / _PROMPT_SHARE if expected is None else min(expected - prompt, prompt / _PROMPT_SHARE)
    return streamed * (-(-prompt // chunk) + max(0.0, answer))


def _sizes(
    run: Resolved, base: EngineConfig, least: int, longest: int, share: int = EVICTED_SHARE
) -> Iterator[EngineConfig]:
    """Configurations with decreasing rows and, for each, decreasing prefill chunks; slightly fewer rows stand for short
    chunks if that saves as much, and the run is not known to need them."""

    def sized(rows: int) -> list[EngineConfig]:
        return [
            replace(base, capacity=rows, chunk=chunk, logits_rows=min(base.logits_rows, chunk))
            for chunk in _chunks(run, rows, longest, share)
        ]

    def nbytes(config: EngineConfig) -> int:
        need = run.footprint(config)
        return need.kv + need.scratch

    rows = base.capacity
    while True:
        found, fewer = sized(rows), rows - SMALLEST_ROWS
        if fewer >= max(least, rows - rows // _FEW) and not run.options.expected_tokens and found[-1].chunk <= _SHORT:
            spared = [each for each in sized(fewer) if each.chunk > _SHORT]
            if spared and nbytes(spared[-1]) <= nbytes(found[-1]):
                found = [each for each in found if each.chunk > _SHORT] + spared
        yield from found
        if rows <= least:
            return
        rows = max(least, min(rows - SMALLEST_ROWS, int(rows * 0.9) // SMALLEST_ROWS * SMALLEST_ROWS))


def _chunks(run: Resolved, rows: int, longest: int, share: int) -> list[int]:
    """Prefill steps worth trying, `longest` first; an encoder's is the whole text. A chunk that evicts must leave most
    rows in place: it has at most 1/share of the rows. Raises InputError for a stated step that is too long."""
    evicts = run.policy.evicts and (run.options.expected_tokens or rows + 1) > rows
    if run.spec.encoder:
        return [rows]
    if run.chunk:
        most = max(1, rows // 2) if evicts else rows
        if run.chunk > most:
            raise InputError(f"--prefill-step-size {run.chunk} is too long for {rows} KV rows: at most {most}")
        return [run.chunk]
    most = max(1, rows // share) if evicts else rows
    tried = [longest, *(chunk for chunk in _CHUNKS if chunk < longest)]
    return [chunk for chunk in tried if chunk <= most] or [most]
