"""Attention of a step over int8 rows, multiplied as they are stored: an instruction has four times float32's products.

Queries and powers become integers of 16 bits, whose bytes are multiplied apart: products = 256 · high + low. So nothing
is lost beside what the rows' own 8 bits cost. A query's high bytes are signed, and keys unsigned there (128 is added,
and 128 · Σ high subtracted); all other bytes of queries and powers are unsigned.

Layouts, with four bytes in a word: queries [query rows, 2, key / 4], high words before low ones; powers
[query rows, tiles, 2, 4].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.attention import Query, ScoreLimits, Tiles, Work, begin, limit, soften
from edge.backends.tvm.cpu.kernels.cache import Cache
from edge.backends.tvm.cpu.kernels.isas.generic import ByteIsa
from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Register,
    Value,
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
from edge.backends.tvm.targets import Target

_LARGEST_QUERY, _LARGEST_POWER = (1 << 15) - 1, (1 << 16) - 1


@dataclass(frozen=True)
class _Coded:
    """A query as integers: its place in working memory, the scale of its codes, and what its sums start with."""

    at: Value
    scale: Value
    start: Value


def attend_byte_rows(
    target: Target, cache: Cache, queries: Buffer, rows: Sequence[Query], first_row: Value, tiles: Tiles,
    work: Work, codes: Value, limits: ScoreLimits,
) -> None:  # fmt: skip
    """As `attend`. codes: offset of the thread's working memory for queries."""
    isa = cache.isa
    assert isinstance(isa, ByteIsa)
    coded = [
        _encode(cache, queries, query, work.memory, let(codes + line * (cache.key // 2)))
        for line, query in enumerate(rows)
    ]
    begin(cache, rows, work)
    with loop(i64(0), quotient(tiles.last - tiles.first + (work.block - 1), work.block)) as step:
        start = let(tiles.first + step * work.block)
        count = let(T.min(i64(work.block), tiles.last - start))
        _score(isa, cache, rows, coded, first_row, tiles, start, count, work, limits)
        visible = rows[-1].visible
        most = let(_largest_scale(cache, first_row, tiles, start, count, visible))
        inverse = let(T.if_then_else(most > T.float32(0), T.float32(_LARGEST_POWER) / most, T.float32(0)))

        def pack(powers: Value, index: Value) -> Value:
            """16 powers as 4 words of high bytes and 4 of low ones."""
            seen = T.Select(_exist(tiles.at(let(start + index)), visible), powers * spread(inverse), floats(0))
            code = let(rounded(seen))
            both = T.vectorcombine("uint8x32", *(T.cast(each, "uint8x16") for each in (code >> ints(8), code)))
            return T.reinterpret("float32x8", both)

        soften(cache, rows, first_row, tiles, start, count, work, pack=pack)
        factor = let(spread(most * T.float32(1 / _LARGEST_POWER)))
        _mix(isa, target, cache, len(rows), first_row, tiles, start, count, work, factor)


def _encode(cache: Cache, queries: Buffer, query: Query, memory: Buffer, at: Value) -> _Coded:
    parts = [let(load(queries, query.at + part * 16)) for part in range(cache.key // 16)]
    most = let(largest(greatest(parts)))
    inverse = let(spread(T.if_then_else(most > T.float32(0), T.float32(_LARGEST_QUERY) / most, T.float32(0))))
    total = ints(0)
    for number, part in enumerate(parts):
        code = let(rounded(part * inverse))
        high = let(code >> ints(8))
        total = let(total + high)
        for which, each in enumerate((high, code)):
            words = T.reinterpret("float32x4", T.cast(each, "int8x16"))
            store(memory, at + which * (cache.key // 4) + number * 4, words, 4)
    start = let(spread(pure("int32", "llvm.vector.reduce.add", total) * T.int32(-128)))
    return _Coded(at, let(most * T.float32(1 / _LARGEST_QUERY)), start)


def _score(
    isa: ByteIsa, cache: Cache, rows: Sequence[Query], coded: Sequence[_Coded], first_row: Value, tiles: Tiles,
    start: Value, count: Value, work: Work, limits: ScoreLimits,
) -> None:  # fmt: skip
    """work.scores = Q Kᵀ for `count` tiles, whose values are prefetched."""
    words = cache.key // 4
    with loop(i64(0), count) as index:
        tile = let(tiles.at(start + index))
        keys_at = let((first_row + tile * 16) * cache.key)
        sums = [[Register("int32"), Register("int32")] for _ in rows]
        for (high, low), query in zip(sums, coded, strict=True):
            high.value, low.value = query.start, ints(0)
        with loop(i64(0), i64(words)) as word:
            cache.fetch_values(first_row, tile, word, 4)
            keys = isa.quadruples(load(cache.keys, keys_at + word * 64, 64))
            plus = let(keys ^ ints(-0x7F7F7F80))
            for (high, low), query in zip(sums, coded, strict=True):
                one, other = (_word(work.memory, query.at + which * words + word) for which in (0, 1))
                high.value = isa.products(high.value, plus, one)
                low.value = isa.products(low.value, other, keys)
        (scale,) = cache.scales(cache.key_scales, first_row, tile)
        for line, ((high, low), query) in enumerate(zip(sums, coded, strict=True)):
            score = _joined(high.value, low.value) * (scale * spread(query.scale))
            at = work.scores + line * (work.block * 16) + index * 16
            store(work.memory, at, limit(score, rows[line], first_row, tile, limits))


def _largest_scale(cache: Cache, first_row: Value, tiles: Tiles, start: Value, count: Value, visible: Value) -> Value:
    """Of the values of a block's rows."""
    found = Register()
    found.value = floats(0)
    with loop(i64(0), count) as index:
        tile = tiles.at(start + index)
        (scale,) = cache.scales(cache.value_scales, first_row, tile)
        found.value = T.max(found.value, T.Select(_exist(tile, visible), scale, floats(0)))
    return largest(found.value)


def _mix(
    isa: ByteIsa, target: Target, cache: Cache, rows: int, first_row: Value, tiles: Tiles, start: Value,
    count: Value, work: Work, factor: Value,
) -> None:  # fmt: skip
    """work.out += powers · V for a block, whose successor's keys are prefetched; as many query rows as fit."""
    parts, fitting = cache.value // 16, target.mix_registers // 2
    height = min(rows, fitting)
    width = min(parts, fitting // height)
    for top in range(0, rows, height):
        lines = range(top, min(top + height, rows))
        for left in range(0, parts, width):
            columns = range(left, min(left + width, parts))
            sums = {(line, part): (Register("int32"), Register("int32")) for line in lines for part in columns}
            for high, low in sums.values():
                high.value = low.value = ints(0)
            with loop(i64(0), count) as index, loop(i64(0), i64(4)) as four:
                row = let(tiles.at(start + index) * 16 + four * 4)
                if top == left == 0:
                    later = tiles.at(start + index + work.block)
                    for each in range(4):
                        cache.fetch_keys(first_row, later, four * 4 + each)
                powers = [
                    [
                        _word(work.memory, work.scores + line * (work.block * 16) + index * 8 + which * 4 + four)
                        for which in (0, 1)
                    ]
                    for line in lines
                ]
                for part in columns:
                    at = let((first_row + row) * cache.value + part * 16)
                    four_rows = [load(cache.values, at + each * cache.value) for each in range(4)]
                    halves = [T.vectorcombine("int8x32", *four_rows[each : each + 2]) for each in (0, 2)]
                    values = isa.quadruples(T.vectorcombine("int8x64", *halves))
                    for line, words in zip(lines, powers, strict=True):
                        for register, word in zip(sums[line, part], words, strict=True):
                            register.value = isa.products(register.value, word, values)
            for (line, part), (high, low) in sums.items():
                at = work.out + line * cache.value + part * 16
                store(work.memory, at, load(work.memory, at) + _joined(high.value, low.value) * factor)


def _word(memory: Buffer, at: Value) -> Value:
    """Four bytes, in each lane."""
    return let(spread(T.reinterpret("int32", memory[at])))


def _joined(high: Value, low: Value) -> Value:
    return T.cast(high, "float32x16") * floats(256) + T.cast(low, "float32x16")


def _exist(tile: Value, visible: Value) -> Value:
    """Which rows of a tile are there: what lies behind them may be no numbers."""
    return T.ramp(T.cast(tile * 16, "int32"), T.int32(1), 16) < spread(T.cast(visible, "int32"))
