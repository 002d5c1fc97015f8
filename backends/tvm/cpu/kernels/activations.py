"""Activations as matrix products read them: float32 rows, and the same rows in blocks of 32 signed bytes.

A block is q = round(x · 127 / max|x|) with one float32 scale, as in llama.cpp's Q8_0, but rounded from the exact
scale. Products with integer weights need no floats until the block's end, so sums of q are stored beside it: of all
32, and of 16 each for weights with group size 16.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import (
    Buffer,
    Value,
    i64,
    largest,
    let,
    load,
    loop,
    magnitude,
    pure,
    rounded,
    spread,
    store,
)

BLOCK = 32
CENTER = {32: 8, 16: 4}  # factors of the stored sums, by group size: the centers of Q4_0 and Q3_K


@dataclass(frozen=True)
class Sums:
    """Two sums of every 32 or 16 values."""

    corrections: Value  # −CENTER · Σ q, int32
    sums: Value  # scale · Σ q, float32


@dataclass(frozen=True)
class Quantized:
    """Rows of signed bytes, four to a word, with a scale for each block of 32. Offsets are in elements."""

    integers: Buffer  # int32
    words: Value  # their start; stride / 4 for each row
    numbers: Buffer  # float32
    scales: Value  # their start; stride / 32 for each row
    sums: Mapping[int, Sums]  # by group size
    stride: int
    first: Value | int = 0  # the block of each row that products begin with

    def words_at(self, row: Value) -> Value:
        return self.words + row * (self.stride // 4) + self.first * (BLOCK // 4)

    def blocks_at(self, row: Value) -> Value:
        return row * (self.stride // BLOCK) + self.first


def quantize(
    source: Buffer, start: Value, columns: int, out: Quantized, row: Value, group_sizes: Collection[int]
) -> None:  # fmt: skip
    """Row `row` of `out` becomes source[start : start + columns], with sums for these group sizes."""
    words, blocks = let(out.words_at(row)), let(out.blocks_at(row))
    with loop(i64(0), i64(columns // BLOCK)) as block:
        low = let(load(source, start + block * BLOCK))
        high = let(load(source, start + block * BLOCK + 16))
        size = let(largest(T.max(magnitude(low), magnitude(high))))
        inverse = let(T.if_then_else(size > T.float32(0), T.float32(127) / size, T.float32(0)))
        scale = let(size * T.float32(1 / 127))
        first, second = (let(rounded(half * spread(inverse))) for half in (low, high))
        store(out.integers, words + block * 8, _bytes(first), 4)
        store(out.integers, words + block * 8 + 4, _bytes(second), 4)
        T.buffer_store(out.numbers, scale, [out.scales + blocks + block])
        for group_size in group_sizes:
            sums, parts = out.sums[group_size], (first + second,) if group_size == BLOCK else (first, second)
            for index, part in enumerate(parts):
                count, at = let(pure("int32", "llvm.vector.reduce.add", part)), (blocks + block) * len(parts) + index
                T.buffer_store(out.numbers, scale * T.cast(count, "float32"), [sums.sums + at])
                T.buffer_store(out.integers, count * T.int32(-CENTER[group_size]), [sums.corrections + at])


def _bytes(integers: Value) -> Value:
    """16 small int32 lanes as 4 words of 4 bytes."""
    return T.reinterpret("int32x4", T.cast(integers, "int8x16"))
