"""Weights times activations: 16 rows of a matrix (a tile) against one token or several at once.

Decode reads each weight once and is bound by memory. Prefill reads a tile once for several tokens: its registers
are unpacked once per block and serve every token. Both are this kernel, with one token or `Target.gemm_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.blocks.base import Block, FloatBlock, IntegerBlock
from edge.backends.tvm.kernels.activations import BLOCK, CENTER, Quantized
from edge.backends.tvm.kernels.isa import Isa
from edge.backends.tvm.kernels.lanes import (
    Buffer,
    Register,
    Value,
    floats,
    i64,
    ints,
    let,
    load,
    loop,
    prefetch,
    spread,
)


@dataclass(frozen=True)
class Matrix:
    """A packed matrix in the file of weights: its block type, its width, and where it lies (bytes)."""

    block: Block
    columns: int
    quants: Value
    scales: Value


@dataclass(frozen=True)
class Weights:
    """The file of weights, seen as each of the types that it holds."""

    words: Buffer  # int32
    halves: Buffer  # uint16: scales, F16, BF16
    floats: Buffer  # float32: F32, norms


@dataclass(frozen=True)
class Inputs:
    """The activations of a product: float rows, `stride` values each, and the same quantized.

    Without the latter, integer weights are multiplied with the floats: the exact mode.
    """

    floats: Buffer
    start: Value
    stride: int
    quantized: Quantized | None


def multiply(
    isa: Isa, weights: Weights, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value], ahead: int = 0
) -> list[Register]:
    """16 products of tile `tile` with each of the given rows of the inputs.

    ahead: bytes by which memory is asked for weights before they are multiplied, or 0.
    """
    sums = [Register() for _ in rows]
    for each in sums:
        each.value = floats(0)
    if isinstance(matrix.block, FloatBlock):
        _float_weights(isa, weights, matrix, matrix.block, tile, inputs, rows, sums)
    elif inputs.quantized is None:
        _exact(isa, weights, matrix, matrix.block, tile, inputs, rows, sums)
    else:
        _integers(isa, weights, matrix, matrix.block, tile, inputs.quantized, rows, sums, ahead)
    return sums


def _integers(
    isa: Isa, weights: Weights, matrix: Matrix, block: IntegerBlock, tile: Value, x: Quantized,
    rows: Sequence[Value], sums: list[Register], ahead: int,
) -> None:  # fmt: skip
    """Σ over blocks of d · s · (Σ w q − center Σ q) + m · s Σ q, where s and q are the activations'."""
    count = matrix.columns // block.values
    words = let((matrix.quants + tile * (count * block.quant_bytes)) // 4)
    halves = let((matrix.scales + tile * (count * block.scale_bytes)) // 2)
    x_words = [let(x.words_at(row)) for row in rows]
    x_blocks = [let(x.blocks_at(row)) for row in rows]
    center = block.center + (isa.signed_offset if block.signed else 0)
    with loop(i64(0), i64(count)) as at:
        first = let(words + at * (block.quant_bytes // 4))
        if ahead:
            for line in range(0, block.quant_bytes, 64):
                prefetch(weights.words, first + (ahead + line) // 4)
        registers, scale, minimum = _read_block(isa, weights, block, first, halves + at * (block.scale_bytes // 2))
        parts = T.int32(center // CENTER)
        starts = [spread(x.integers[x.corrections + b + at] * parts) if center else ints(0) for b in x_blocks]
        words_of_x = [[x.integers[w + at * (BLOCK // 4) + i] for i in range(len(registers))] for w in x_words]
        dots = isa.dots(starts, registers, words_of_x, None if block.signed else block.largest)
        for each, block_at, products in zip(sums, x_blocks, dots, strict=True):
            factor = scale * spread(x.numbers[x.scales + block_at + at])
            result = each.value + T.cast(products, "float32x16") * factor
            if minimum is not None:
                result = result + minimum * spread(x.numbers[x.sums + block_at + at])
            each.value = result


def _exact(
    isa: Isa, weights: Weights, matrix: Matrix, block: IntegerBlock, tile: Value, inputs: Inputs,
    rows: Sequence[Value], sums: list[Register],
) -> None:  # fmt: skip
    """The same with every weight made a float: slow, for tests and for comparison."""
    count = matrix.columns // block.values
    words = let((matrix.quants + tile * (count * block.quant_bytes)) // 4)
    halves = let((matrix.scales + tile * (count * block.scale_bytes)) // 2)
    starts = [let(inputs.start + row * inputs.stride) for row in rows]
    with loop(i64(0), i64(count)) as at:
        first = let(words + at * (block.quant_bytes // 4))
        registers, scale, minimum = _read_block(isa, weights, block, first, halves + at * (block.scale_bytes // 2))
        for index, register in enumerate(registers):
            for byte in range(4):
                weight = let(_weight(block, register, byte, scale, minimum))
                for each, start in zip(sums, starts, strict=True):
                    x = inputs.floats[start + at * block.values + (4 * index + byte)]
                    each.value = each.value + weight * spread(x)


def _read_block(
    isa: Isa, weights: Weights, block: IntegerBlock, first: Value, scales: Value
) -> tuple[Sequence[Value], Value, Value | None]:
    """A packed block of 16 rows at word `first`: its registers, d, and m if it has any."""
    registers = block.registers(lambda index: load(weights.words, first + index * 16))
    at = let(scales)
    scale = let(isa.from_f16(load(weights.halves, at)))
    return registers, scale, let(isa.from_f16(load(weights.halves, at + 16))) if block.has_minimum else None


def _weight(block: IntegerBlock, register: Value, byte: int, scale: Value, minimum: Value | None) -> Value:
    """16 weights as floats. Unsigned bytes are below 128, so reading them as signed is no matter."""
    quant = (register << ints(24 - 8 * byte)) >> ints(24)
    weight = T.cast(quant - ints(block.center), "float32x16") * scale
    return weight if minimum is None else weight + minimum


def _float_weights(
    isa: Isa, weights: Weights, matrix: Matrix, block: FloatBlock, tile: Value, inputs: Inputs,
    rows: Sequence[Value], sums: list[Register],
) -> None:  # fmt: skip
    memory = weights.floats if block.raw_bytes == 4 else weights.halves
    first = let(matrix.quants // block.raw_bytes + tile * (matrix.columns * 16))
    starts = [let(inputs.start + row * inputs.stride) for row in rows]
    with loop(i64(0), i64(matrix.columns)) as at:
        weight = let(block.decode(isa, load(memory, first + at * 16)))
        for each, start in zip(sums, starts, strict=True):
            each.value = each.value + weight * spread(inputs.floats[start + at])


def copy_row(isa: Isa, weights: Weights, matrix: Matrix, row: Value, out: Buffer, out_at: Value) -> None:
    """out[out_at : out_at + columns] = row `row` of the matrix: the embedding of a token.

    Works through whole tiles, of which one lane is kept: 16 × the work of a few µs, and no second layout.
    """
    block, tile, lane = matrix.block, let(row // 16), let(row % 16)
    kept = Register()
    if isinstance(block, FloatBlock):
        memory = weights.floats if block.raw_bytes == 4 else weights.halves
        first = let(matrix.quants // block.raw_bytes + tile * (matrix.columns * 16))
        with loop(i64(0), i64(matrix.columns)) as at:
            kept.value = block.decode(isa, load(memory, first + at * 16))
            T.buffer_store(out, kept.lane(lane), [out_at + at])
        return
    count = matrix.columns // block.values
    with loop(i64(0), i64(count)) as at:
        first = let((matrix.quants + (tile * count + at) * block.quant_bytes) // 4)
        scales_at = (matrix.scales + (tile * count + at) * block.scale_bytes) // 2
        registers, scale, minimum = _read_block(isa, weights, block, first, scales_at)
        for index, register in enumerate(registers):
            for byte in range(4):
                kept.value = _weight(block, register, byte, scale, minimum)
                T.buffer_store(out, kept.lane(lane), [out_at + at * block.values + (4 * index + byte)])
