"""Attention of an encoder's chunk whose scores are products of 8 bits: four times those of float32 in an instruction.

As in `pairs.py`, a block of keys and values is converted once for many query rows. Up to 32 neighbouring values of a
query or a key share a scale, as activations do; powers and values are float32.

Layouts: queries [query rows, key / 4], four bytes in a word; their scales and corrections [query rows, groups]; keys
[tiles, key / 4, 16 rows], their scales [tiles, groups, 16 rows]; values [rows, value].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import (
    Query,
    ScoreLimits,
    Tiles,
    Work,
    add_product,
    begin,
    limit,
    mix,
    soften,
)
from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Value,
    exp_short,
    floats,
    greatest,
    i64,
    ints,
    largest,
    let,
    load,
    loop,
    pure,
    quotient,
    rounded,
    spread,
    store,
)
from edge.backends.tvm.cpu.scratch import byte_groups
from edge.backends.tvm.targets import Target


@dataclass(frozen=True)
class Held:
    """A converted block: offsets into a thread's working memory. Integers are stored as the bits of floats."""

    queries: Value
    query_scales: Value
    corrections: Value
    keys: Value
    key_scales: Value
    values: Value


def attend_bytes(
    target: Target, cache: Cache, queries: Buffer, rows_of: Callable[[Value], Sequence[Query]], groups: Value,
    first_row: Value, tiles: Tiles, visible: Value, work: Work, held: Held, limits: ScoreLimits,
) -> None:  # fmt: skip
    """As `attend_pairs`."""
    height = target.score_rows

    def work_of(group: Value) -> Work:
        return work.of_rows(let(group * height), cache.value)

    with loop(i64(0), groups) as group:
        rows = rows_of(group)
        begin(cache, rows, work_of(group))
        for index, query in enumerate(rows):
            _quantize_query(cache, queries, query, work.memory, held, let(group * height + index))
    with loop(i64(0), quotient(tiles.last - tiles.first + (work.block - 1), work.block)) as step:
        start = let(tiles.first + step * work.block)
        count = let(T.min(i64(work.block), tiles.last - start))
        _quantize_keys(cache, first_row, start, count, work.memory, held)
        with loop(i64(0), let(T.min(count * 16, visible - start * 16))) as row:
            for part, values in cache.load_values(first_row, start * 16 + row, range(cache.value // 16)).items():
                store(work.memory, held.values + row * cache.value + part * 16, values)
        with loop(i64(0), groups) as group:
            rows, own = rows_of(group), work_of(group)
            _score(cache, rows, first_row, start, count, own, held, let(group * height), limits)
            soften(cache, rows, first_row, tiles, start, count, own, exp_short)
            most = let(T.min(count * 16, rows[-1].visible - start * 16))
            _mix(target, cache, height, most, own, held.values)


def _quantize_query(cache: Cache, queries: Buffer, query: Query, memory: Buffer, held: Held, row: Value) -> None:
    groups = byte_groups(cache.key)
    for number, (first, count) in enumerate(groups):
        parts = [let(load(queries, query.at + (first + part) * 16)) for part in range(count)]
        size = let(largest(greatest(parts)))
        inverse = spread(let(T.if_then_else(size > T.float32(0), T.float32(127) / size, T.float32(0))))
        codes = [let(rounded(part * inverse)) for part in parts]
        for part, each in enumerate(codes):
            words = T.reinterpret("float32x4", T.cast(each, "int8x16"))
            store(memory, held.queries + row * (cache.key // 4) + (first + part) * 4, words, 4)
        place = let(row * len(groups) + number)
        T.buffer_store(memory, size * T.float32(1 / 127), [held.query_scales + place])
        summed = pure("int32", "llvm.vector.reduce.add", _sum(codes))
        corrected = T.reinterpret("float32", summed * T.int32(-cache.isa.signed_offset))
        T.buffer_store(memory, corrected, [held.corrections + place])


def _quantize_keys(cache: Cache, first_row: Value, start: Value, count: Value, memory: Buffer, held: Held) -> None:
    groups = byte_groups(cache.key)
    with loop(i64(0), count) as index:
        for number, (first, parts) in enumerate(groups):
            dimensions = range(first * 16, (first + parts) * 16)
            keys = [let(*cache.load_keys(first_row, start + index, i64(each))) for each in dimensions]
            size = let(greatest(keys))
            inverse = let(T.Select(size > floats(0), floats(127) / size, floats(0)))
            store(memory, held.key_scales + (index * len(groups) + number) * 16, size * floats(1 / 127))
            for word in range(0, len(keys), 4):
                codes = [rounded(key * inverse) for key in keys[word : word + 4]]
                low = [T.shift_left(code & ints(255), ints(8 * place)) for place, code in enumerate(codes[:3])]
                packed = T.shift_left(codes[3], ints(24)) | low[2] | low[1] | low[0]
                at = held.keys + (index * (cache.key // 4) + first * 4 + word // 4) * 16
                store(memory, at, T.reinterpret("float32x16", packed))


def _score(
    cache: Cache, rows: Sequence[Query], first_row: Value, start: Value, count: Value, work: Work, held: Held,
    line: Value, limits: ScoreLimits,
) -> None:  # fmt: skip
    """work.scores = Q Kᵀ for `count` tiles. line: the first of the query rows."""
    groups, words, memory = byte_groups(cache.key), cache.key // 4, work.memory

    def integer(at: Value) -> Value:
        return T.reinterpret("int32", memory[at])

    with loop(i64(0), count) as index:
        scores: list[Value] = []
        for number, (first, parts) in enumerate(groups):
            at = let(held.keys + (index * words + first * 4) * 16)
            keys = [let(T.reinterpret("int32x16", load(memory, at + word * 16))) for word in range(parts * 4)]
            scale = let(load(memory, held.key_scales + (index * len(groups) + number) * 16))
            starts, words_of = [], []
            for row in range(len(rows)):
                starts.append(spread(integer(held.corrections + (line + row) * len(groups) + number)))
                first_word = held.queries + (line + row) * words + first * 4
                words_of.append([integer(first_word + word) for word in range(parts * 4)])
            for row, dot in enumerate(cache.isa.dots(starts, keys, words_of, None)):
                factor = scale * spread(memory[held.query_scales + (line + row) * len(groups) + number])
                product = T.cast(dot, "float32x16") * factor
                if number:
                    scores[row] = let(scores[row] + product)
                else:
                    scores.append(let(product))
        for row, (score, query) in enumerate(zip(scores, rows, strict=True)):
            at = work.scores + row * (work.block * 16) + index * 16
            store(memory, at, limit(score, query, first_row, let(start + index), limits))


def _mix(target: Target, cache: Cache, rows: int, most: Value, work: Work, values: Value) -> None:
    """work.out += powers · V over a block's rows."""

    @contextmanager
    def over() -> Iterator[tuple[Value, Value]]:
        with loop(i64(0), most) as row:
            yield row, let(values + row * cache.value)

    def load_values(at: Value, parts: Sequence[int]) -> dict[int, Value]:
        return {part: let(load(work.memory, at + part * 16)) for part in parts}

    mix(target, cache, rows, work, over, load_values, add_product)


def _sum(vectors: Sequence[Value]) -> Value:
    return vectors[0] if len(vectors) == 1 else vectors[0] + vectors[1]
