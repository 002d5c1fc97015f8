"""Latent attention of a chunk in its expanded form: keys and values of one head, made of blocks of latent rows.

In the absorbed form, each query is multiplied with whole rows, here with the head's own keys and values, which are a
third to a fifth as long; they are made once for all queries of a chunk. All products are of pairs of BF16, as in
`pairs.py`, whose layouts of keys and values these are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import Query, ScoreLimits, Tiles, Work, begin, soften
from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.isas.generic import PairIsa
from edge.backends.tvm.cpu.kernels.pairs import mix_pairs, pack_keys, score_pairs
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
    remainder,
    spread,
    store,
    when,
)
from edge.backends.tvm.cpu.scratch import EXPANDED_BLOCK as BLOCK
from edge.backends.tvm.targets import Target

_DIMENSIONS, _TILES = 8, 2  # of keys, and tiles of rows, whose sums are in registers
_ROWS, _PARTS = 4, 4  # rows, and parts of 16 values, likewise


@dataclass(frozen=True)
class HeadMatrices:
    """A head's matrices, two BF16 in a float of `memory`. keys: the offset of [plain, rank / 2], neighbours in a row.
    values: of [rank / 2, value], neighbours in a column."""

    memory: Buffer
    keys: Value
    values: Value
    rank: int
    plain: int
    value: int


@dataclass(frozen=True)
class Expanded:
    """Offsets into a thread's working memory: a block's rows [tiles, row / 2, 16], its keys and values, and queries."""

    rows: Value
    keys: Value
    values: Value
    queries: Value


def attend_expanded(
    target: Target, cache: Cache, matrices: HeadMatrices, queries: Buffer, rows_of: Callable[[Value], Sequence[Query]],
    pack_query: Callable[[Query, Value], None], groups: Value, first_row: Value, visible: Value, work: Work,
    memory: Expanded, limits: ScoreLimits,
) -> None:  # fmt: skip
    """As `attend_pairs`, of all queries of a head. cache: of latent rows. pack_query: writes a query in BF16."""
    isa, height = cache.isa, target.score_rows
    assert isinstance(isa, PairIsa)
    own = replace(cache, key=matrices.plain + cache.key - matrices.rank, value=matrices.value)

    def work_of(group: Value) -> Work:
        return work.of_rows(let(group * height), own.value)

    def queries_of(group: Value) -> Value:
        return let(memory.queries + group * (height * own.key // 2))

    with loop(i64(0), groups) as group:
        rows = rows_of(group)
        begin(own, rows, work_of(group))
        for index, query in enumerate(rows):
            pack_query(query, let(queries_of(group) + index * own.key // 2))
    tiles = Tiles(i64(0), let(quotient(visible + 15, 16)))
    with loop(i64(0), quotient(tiles.last + (BLOCK - 1), BLOCK)) as step:
        start = let(step * BLOCK)
        count = let(T.min(i64(BLOCK), tiles.last - start))
        pack_keys(isa, cache, first_row, start, count, work.memory, memory.rows)
        _expand_keys(isa, cache, own, matrices, count, work.memory, memory)
        _expand_values(isa, cache, matrices, count, let(visible - start * 16), work.memory, memory)
        with loop(i64(0), groups) as group:
            rows, at = rows_of(group), work_of(group)
            with when(rows[-1].visible > start * 16):
                score_pairs(
                    isa, target, own, queries, rows, first_row, start, count, at, queries_of(group), memory.keys, limits
                )  # fmt: skip
                soften(
                    own, rows, first_row, tiles, start, count, at, exp_short, lambda powers, _: isa.neighbours(powers)
                )
                most = let(T.min(count * 16, rows[-1].visible - start * 16))
                mix_pairs(isa, target, own, height, most, at, memory.values)


def _expand_keys(
    isa: PairIsa, cache: Cache, own: Cache, matrices: HeadMatrices, count: Value, memory: Buffer, at: Expanded
) -> None:
    """keys[tile, pair, 16 rows]: the head's, and behind them the rotated part of the rows."""
    width, out, half = cache.key // 2, own.key // 2, matrices.rank // 2
    with loop(i64(0), quotient(count + (_TILES - 1), _TILES)) as group:
        first = let(group * _TILES)  # tiles behind the last are not read
        with loop(i64(0), i64(matrices.plain // _DIMENSIONS)) as part:
            dimension = let(part * _DIMENSIONS)
            sums = [[Register() for _ in range(_DIMENSIONS)] for _ in range(_TILES)]
            for line in sums:
                for each in line:
                    each.value = floats(0)
            with loop(i64(0), i64(half)) as pair:
                rows = [let(load(memory, at.rows + ((first + tile) * width + pair) * 16)) for tile in range(_TILES)]
                for number in range(_DIMENSIONS):
                    weight = let(spread(matrices.memory[matrices.keys + (dimension + number) * half + pair]))
                    for line, row in zip(sums, rows, strict=True):
                        line[number].value = isa.dot_pairs(line[number].value, row, weight)
            for tile, line in enumerate(sums):
                for number in range(0, _DIMENSIONS, 2):
                    both = isa.pair(line[number].value, line[number + 1].value)
                    place = (first + tile) * out + quotient(dimension, 2) + number // 2
                    store(memory, at.keys + place * 16, both)
        for tile in range(_TILES):
            with loop(i64(0), i64(width - half)) as pair:
                rotated = load(memory, at.rows + ((first + tile) * width + half + pair) * 16)
                store(memory, at.keys + ((first + tile) * out + matrices.plain // 2 + pair) * 16, rotated)


def _expand_values(
    isa: PairIsa, cache: Cache, matrices: HeadMatrices, count: Value, left: Value, memory: Buffer, at: Expanded
) -> None:
    """values[row / 2, value]. left: rows that some query sees; those behind may be no numbers, and become zeros."""
    width, half, size = cache.key // 2, matrices.rank // 2, matrices.value
    with loop(i64(0), count * (16 // _ROWS)) as group:
        row = let(group * _ROWS)
        words = let(at.rows + quotient(row, 16) * (width * 16) + remainder(row, 16))
        for first in range(0, size // 16, _PARTS):
            parts = range(first, min(first + _PARTS, size // 16))
            sums = [[Register() for _ in parts] for _ in range(_ROWS)]
            for line in sums:
                for each in line:
                    each.value = floats(0)
            with loop(i64(0), i64(half)) as pair:
                weights = [let(load(matrices.memory, matrices.values + pair * size + part * 16)) for part in parts]
                for number, line in enumerate(sums):
                    x = let(spread(memory[words + pair * 16 + number]))
                    for each, weight in zip(line, weights, strict=True):
                        each.value = isa.dot_pairs(each.value, weight, x)
            for number in range(0, _ROWS, 2):
                limit = spread(T.cast(left, "int32"))
                there = [spread(T.cast(row + number + index, "int32")) < limit for index in (0, 1)]
                for part, one, other in zip(parts, sums[number], sums[number + 1], strict=True):
                    both = isa.pair(
                        T.Select(there[0], one.value, floats(0)), T.Select(there[1], other.value, floats(0))
                    )
                    store(memory, at.values + (quotient(row, 2) + number // 2) * size + part * 16, both)
