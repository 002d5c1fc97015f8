"""Attention of a chunk on CPUs that multiply pairs of BF16: twice the products of float32 in an instruction.

A block of keys and values is converted once for many query rows, a few at a time of which are in registers. Queries
and powers are rounded to BF16, too; maxima, sums and outputs stay in float32. Keys and values in int8 or int4 lose
nothing: their codes are exact in BF16, and scales are applied to scores and powers.

Layouts, with a pair in each lane: keys [tiles, key / 2, 16 rows], neighbouring dimensions; values
[rows / 2, value], neighbouring rows; queries [query rows, key / 2]; powers [query rows, rows / 2].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import (
    Query,
    ScoreLimits,
    Tiles,
    Work,
    begin,
    limit,
    mix,
    query_sum,
    scaled,
    soften,
    tiles_at_once,
)
from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.isas.generic import PairIsa
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Value,
    exp_short,
    floats,
    i64,
    let,
    load,
    loop,
    quotient,
    spread,
    store,
)
from edge.backends.tvm.kv.row_formats import STEPS
from edge.backends.tvm.targets import Target


@dataclass(frozen=True)
class Paired:
    """What is in BF16: offsets into a thread's working memory."""

    queries: Value
    keys: Value
    values: Value


def attend_pairs(
    target: Target, cache: Cache, queries: Buffer, rows_of: Callable[[Value], Sequence[Query]], groups: Value,
    first_row: Value, tiles: Tiles, visible: Value, work: Work, paired: Paired, limits: ScoreLimits,
) -> None:  # fmt: skip
    """As `attend`, for `groups` groups of `target.score_rows` query rows, which `rows_of` returns for a group's number.

    visible: the number of cache rows that the last query sees, which sees most.
    """
    isa, height = cache.isa, target.score_rows
    assert isinstance(isa, PairIsa)
    if cache.form.scales > 1:
        cache = replace(cache, middle=STEPS / 2)

    def work_of(group: Value) -> Work:
        return work.of_rows(let(group * height), cache.value)

    def queries_of(group: Value) -> Value:
        return let(paired.queries + group * (height * cache.key // 2))

    with loop(i64(0), groups) as group:
        rows = rows_of(group)
        begin(cache, rows, work_of(group))
        for index, query in enumerate(rows):
            for part in range(cache.key // 16):
                pairs = isa.neighbours(load(queries, query.at + part * 16))
                store(work.memory, queries_of(group) + (index * cache.key // 2 + part * 8), pairs, 8)
    with loop(i64(0), quotient(tiles.last - tiles.first + (work.block - 1), work.block)) as step:
        start = let(tiles.first + step * work.block)
        count = let(T.min(i64(work.block), tiles.last - start))
        pack_keys(isa, cache, first_row, start, count, work.memory, paired.keys)
        _pack_values(
            isa, cache, first_row, start, let(T.min(count * 16, visible - start * 16)), work.memory, paired.values
        )
        with loop(i64(0), groups) as group:
            rows, own = rows_of(group), work_of(group)
            score_pairs(
                isa, target, cache, queries, rows, first_row, start, count, own, queries_of(group), paired.keys, limits
            )
            soften(
                cache, rows, first_row, tiles, start, count, own, exp_short, lambda powers, _: isa.neighbours(powers)
            )
            most = let(T.min(count * 16, rows[-1].visible - start * 16))
            mix_pairs(isa, target, cache, height, most, own, paired.values)


def pack_keys(
    isa: PairIsa, cache: Cache, first_row: Value, start: Value, count: Value, memory: Buffer, out: Value
) -> None:
    """Tiles of keys, unscaled, as pairs: [tiles, key / 2, 16 rows] from `out` on."""
    width = cache.key // 2
    with loop(i64(0), count) as index, loop(i64(0), i64(width)) as pair:
        if cache.form.packed == 2:
            both = cache.load_keys(first_row, start + index, pair)
        else:
            both = [*cache.load_keys(first_row, start + index, pair * 2)]
            both += cache.load_keys(first_row, start + index, pair * 2 + 1)
        store(memory, out + (index * width + pair) * 16, isa.pair(*both))


def _pack_values(
    isa: PairIsa, cache: Cache, first_row: Value, start: Value, rows: Value, memory: Buffer, out: Value
) -> None:
    """An odd last row is paired with zeros, since what lies behind it may be no numbers."""
    parts = range(cache.value // 16)
    with loop(i64(0), quotient(rows + 1, 2)) as pair:
        row = let(start * 16 + pair * 2)
        first, second = (cache.load_values(first_row, row + at, parts) for at in (0, 1))
        exists = spread(T.cast(pair * 2 + 1, "int32")) < spread(T.cast(rows, "int32"))
        for part in parts:
            both = isa.pair(first[part], T.Select(exists, second[part], floats(0)))
            store(memory, out + (pair * cache.value + part * 16), both)


def score_pairs(
    isa: PairIsa, target: Target, cache: Cache, queries: Buffer, rows: Sequence[Query], first_row: Value,
    start: Value, count: Value, work: Work, paired_queries: Value, paired_keys: Value, limits: ScoreLimits,
) -> None:  # fmt: skip
    """work.scores = Q Kᵀ for `count` tiles; a few tiles at a time, all query rows in registers."""
    side, width = tiles_at_once(target, len(rows)), cache.key // 2
    query_sums = [query_sum(cache, queries, query) for query in rows]
    with loop(i64(0), quotient(count + (side - 1), side)) as group:
        sums = [[Register() for _ in range(side)] for _ in rows]
        for line in sums:
            for each in line:
                each.value = floats(0)
        keys_at = let(paired_keys + group * (side * width * 16))
        with loop(i64(0), i64(width)) as pair:
            keys = [let(load(work.memory, keys_at + (offset * width + pair) * 16)) for offset in range(side)]
            for index, line in enumerate(sums):
                x = let(spread(work.memory[paired_queries + index * width + pair]))
                for each, key in zip(line, keys, strict=True):
                    each.value = isa.dot_pairs(each.value, key, x)
        for offset in range(side):
            tile = let(start + group * side + offset)
            scales = cache.scales(cache.key_scales, first_row, tile)
            for index, (line, query, sum_of_query) in enumerate(zip(sums, rows, query_sums, strict=True)):
                score = limit(scaled(line[offset].value, scales, sum_of_query), query, first_row, tile, limits)
                store(work.memory, work.scores + index * (work.block * 16) + (group * side + offset) * 16, score)


def mix_pairs(
    isa: PairIsa, target: Target, cache: Cache, rows: int, most: Value, work: Work, paired_values: Value
) -> None:
    """work.out += powers · V over a block's pairs of rows."""

    @contextmanager
    def over() -> Iterator[tuple[Value, Value]]:
        with loop(i64(0), quotient(most + 1, 2)) as pair:
            yield pair, let(paired_values + pair * cache.value)

    def load_values(at: Value, parts: Sequence[int]) -> dict[int, Value]:
        return {part: let(load(work.memory, at + part * 16)) for part in parts}

    mix(target, cache, rows, work, over, load_values, lambda so_far, power, value: isa.dot_pairs(so_far, value, power))
