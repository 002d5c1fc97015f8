"""Weights times activations: 16 rows of a matrix (a tile) by one or several tokens at once.

Decode reads each weight once and is bound by memory. Prefill reads a tile once for several tokens: its registers
are unpacked once per block and serve every token. Both are this kernel, with one token or `Target.gemm_tokens`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.activations import BLOCK, CENTER, Quantized
from edge.backends.tvm.cpu.kernels.isas.generic import Isa
from edge.backends.tvm.cpu.kernels.isas.wasm import Simd128
from edge.backends.tvm.cpu.kernels.vectors import (
    LANES,
    Buffer,
    Register,
    Value,
    floats,
    i64,
    ints,
    let,
    load,
    loop,
    move_bits,
    pinned,
    prefetch,
    pure,
    quotient,
    remainder,
    shift_to_float,
    spread,
)
from edge.backends.tvm.packing.blocks import BAND, HALVED, PART, Block, FloatBlock, IntegerBlock
from edge.backends.tvm.packing.splits import LOW_BITS
from edge.backends.tvm.targets import Target


@dataclass(frozen=True)
class Matrix:
    """A packed matrix in the file of weights: its block type, its width, and its offsets in bytes."""

    block: Block
    columns: int
    quants: Value
    scales: Value
    tiles: int = 0  # of a matrix in bands (`IntegerBlock.banded`)

    @property
    def pieces(self) -> int:
        """Iterations of a product's loop: parts of integers, or columns of floats."""
        return self.columns // PART if isinstance(self.block, IntegerBlock) else self.columns


Span = tuple[Value, Value]  # start and stop


@dataclass(frozen=True)
class Weights:
    """The file of weights as a buffer of each type that it holds."""

    words: Buffer  # int32
    halves: Buffer  # uint16: scales, F16, BF16
    bytes: Buffer  # int8: factors of scales
    floats: Buffer  # float32: F32, norms


@dataclass(frozen=True)
class Inputs:
    """The activations of a product: rows of floats, `stride` values each, and the same rows quantized.

    Without quantized rows, integer weights are multiplied by the floats: the exact mode.
    """

    floats: Buffer
    start: Value
    stride: int
    quantized: Quantized | None

    def from_block(self, first: Value) -> Inputs:
        """The same rows without their values before this block of 32."""
        quantized = self.quantized and replace(self.quantized, first=first)
        return replace(self, start=let(self.start + first * BLOCK), quantized=quantized)


def multiply(
    isa: Isa, weights: Weights, matrix: Matrix, tile: Value, inputs: Inputs, rows: Sequence[Value],
    target: Target | None = None, span: Span | None = None,
) -> list[Register]:  # fmt: skip
    """16 products of tile `tile` with each of the given rows of the inputs.

    target: determines how weights are prefetched; None: not at all. span: of the matrix's `pieces`; None: all.
    """
    span = span or (i64(0), i64(matrix.pieces))
    sums = [Register() for _ in rows]
    for each in sums:
        each.value = floats(0)
    if isinstance(matrix.block, FloatBlock):
        _float_weights(isa, weights, matrix, matrix.block, tile, inputs, rows, sums, span)
    elif inputs.quantized is None:
        _exact(isa, weights, matrix, matrix.block, tile, inputs, rows, sums, span)
    elif isinstance(isa, Simd128):
        _narrow(isa, weights, matrix, matrix.block, tile, inputs.quantized, rows, sums, span)
    else:
        _integers(isa, weights, matrix, matrix.block, tile, inputs.quantized, rows, sums, target, span)
    return sums


def _integers(
    isa: Isa, weights: Weights, matrix: Matrix, block: IntegerBlock, tile: Value, x: Quantized,
    rows: Sequence[Value], sums: list[Register], target: Target | None, span: Span,
) -> None:  # fmt: skip
    """Σ over groups of d · s · (Σ w q − center Σ q) + m · s Σ q, where s and q are the activations'."""
    planes, first_scales = _tile(matrix, block, tile)
    x_words = [let(x.words_at(row)) for row in rows]
    x_blocks = [let(x.blocks_at(row)) for row in rows]
    center = block.center + (isa.signed_offset if block.signed else 0)
    with loop(*span) as at:
        part = _part_of(planes, at)
        if target and target.fetch_ahead:
            for plane, first in part:
                for line in range(0, plane.part_bytes, 64):
                    prefetch(weights.words, first + (target.fetch_ahead + line) // 4, target.fetch_into)
        groups = _read_part(isa, weights, block, part, first_scales, at)
        x_sums, products = x.sums[block.group_size], []
        for number, group in enumerate(groups):
            starts, words_of_x = [], []
            for x_at, block_at in zip(x_words, x_blocks, strict=True):
                sum_at = (block_at + at) * len(groups) + number
                correction = x.integers[x_sums.corrections + sum_at] * T.int32(center // CENTER[block.group_size])
                starts.append(spread(correction) if center else ints(0))
                word = x_at + at * (PART // 4) + number * len(group.registers)
                words_of_x.append([x.integers[word + index] for index in range(len(group.registers))])
            products.append(isa.dots(starts, group.registers, words_of_x, block.largest))
        for each, block_at, *dots in zip(sums, x_blocks, *products, strict=True):
            result = each.value
            for number, (group, dot) in enumerate(zip(groups, dots, strict=True)):
                factor = group.scale * spread(x.numbers[x.scales + block_at + at])
                result = result + T.cast(dot, "float32x16") * factor
                if group.minimum is not None:
                    sum_at = (block_at + at) * len(groups) + number
                    result = result + group.minimum * spread(x.numbers[x_sums.sums + sum_at])
            each.value = result


def sums_of_scales(
    isa: Isa, weights: Weights, matrix: Matrix, tile: Value, factors: Buffer, starts: Sequence[Value]
) -> list[Register]:  # fmt: skip
    """Σ over parts of |d| · factors[start + part], of 16 rows, for each start. The matrix is one of the halves of
    `HALVED`."""
    assert isinstance(matrix.block, IntegerBlock)
    _, first_scales = _tile(matrix, HALVED, tile)
    found = [Register() for _ in starts]
    for each in found:
        each.value = floats(0)
    with loop(i64(0), i64(matrix.pieces)) as at:
        scale, *_ = _read_scale(isa, weights, HALVED, first_scales, at, 0)
        size = let(pure("float32x16", "llvm.fabs", scale))
        for each, start in zip(found, starts, strict=True):
            each.value = each.value + size * spread(factors[start + at])
    return found


def prefetch_part(weights: Weights, matrix: Matrix, tile: Value, part: Value, target: Target) -> None:
    """Prefetch the quants of a part of a tile, which need not exist."""
    assert isinstance(matrix.block, IntegerBlock)
    planes, _ = _tile(matrix, matrix.block, tile)
    for plane, first in _part_of(planes, part):
        for line in range(0, plane.part_bytes, 64):
            prefetch(weights.words, first + line // 4, target.fetch_into)


def _narrow(
    isa: Simd128, weights: Weights, matrix: Matrix, block: IntegerBlock, tile: Value, x: Quantized,
    rows: Sequence[Value], sums: list[Register], span: Span,
) -> None:  # fmt: skip
    """`_integers` in registers of 4 lanes. Each word of weights is used at once for all its fields and all rows of x,
    and each word of x for all 16 rows of weights."""
    ((_, first_part),), first_scales = _tile(matrix, block, tile)
    x_words = [let(x.words_at(row)) for row in rows]
    x_blocks = [let(x.blocks_at(row)) for row in rows]
    x_sums, groups, lanes = x.sums[block.group_size], PART // block.group_size, range(0, LANES, 4)
    with loop(*span) as at:
        first = let(first_part + at * (block.part_bytes // 4))
        for group in range(groups):
            dots = [[isa.sums(block.largest) for _ in lanes] for _ in rows]
            for fields in _fields(block, group):
                for index in fields:
                    numbers = [x.integers[first_word + at * (PART // 4) + index] for first_word in x_words]
                    words = [isa.operand(each, block.largest) for each in numbers]
                    for quarter, lane in enumerate(lanes):
                        weight = let(_read_register(isa, weights, block, first, index, lane))
                        for line, word in zip(dots, words, strict=True):
                            line[quarter].add(weight, word)
                for line in dots:
                    for some in line:
                        some.pin()
            for quarter, lane in enumerate(lanes):
                scale, *minimum = _read_scale(isa, weights, block, first_scales, at, group, lane, 4)
                for each, line, block_at in zip(sums, dots, x_blocks, strict=True):
                    dot, sum_at = line[quarter].total(), (block_at + at) * groups + group
                    if block.center:
                        correction = x.integers[x_sums.corrections + sum_at]
                        dot = dot + spread(correction * T.int32(block.center // CENTER[block.group_size]), 4)
                    factor, result = scale * spread(x.numbers[x.scales + block_at + at], 4), each.part(lane, 4)
                    result = result + pinned(T.cast(dot, "float32x4") * factor)  # pinned: no relaxed_madd
                    for least in minimum:
                        result = result + pinned(least * spread(x.numbers[x_sums.sums + sum_at], 4))
                    each.set_part(lane, pinned(result), 4)


def _fields(block: IntegerBlock, group: int) -> list[list[int]]:
    """The registers of a group, grouped by the word that holds their lowest bits."""
    count, words = block.group_size // 4, block.planes[0]
    indices = range(group * count, (group + 1) * count)
    return [found for word in range(words) if (found := [index for index in indices if index % words == word])]


def _read_register(isa: Isa, weights: Weights, block: IntegerBlock, first: Value, index: int, lane: int) -> Value:
    """One of `_read_registers`, 4 lanes from `lane` on, of the part at word `first`."""
    found, plane = None, 0  # plane: bits of the planes below
    for bits in block.planes:
        stored = load(weights.words, first + ((plane + index % bits) * 16 + lane), 4)
        field = move_bits(stored, bits, index // bits * bits, plane)
        found, plane = field if found is None else found | field, plane + bits
    return isa.lookup(block.codebook, found) if block.codebook else found


def _exact(
    isa: Isa, weights: Weights, matrix: Matrix, block: IntegerBlock, tile: Value, inputs: Inputs,
    rows: Sequence[Value], sums: list[Register], span: Span,
) -> None:  # fmt: skip
    """`_integers` with every weight converted to a float: slow, for tests and comparisons."""
    planes, first_scales = _tile(matrix, block, tile)
    starts = [let(inputs.start + row * inputs.stride) for row in rows]
    with loop(*span) as at:
        part = _part_of(planes, at)
        for index, weight in enumerate(_weights(block, _read_part(isa, weights, block, part, first_scales, at))):
            weight = let(weight)
            for each, start in zip(sums, starts, strict=True):
                each.value = each.value + weight * spread(inputs.floats[start + at * PART + index])


@dataclass(frozen=True)
class _Group:
    """Neighbouring values of 16 rows, 4 in each register, with a common scale and minimum."""

    registers: Sequence[Value]
    scale: Value
    minimum: Value | None = None


Planes = list[tuple[IntegerBlock, Value]]
"""Where quants begin, in words: a block's, or those of its halves."""


def _tile(matrix: Matrix, block: IntegerBlock, tile: Value) -> tuple[Planes, Value]:
    """Where a tile's quants begin, and the offset of its scales in halves."""
    quants, scales = block.packed_bytes(16, matrix.columns)
    halves = let(quotient(matrix.scales + tile * scales, 2))
    if not block.banded:
        return [(block, let(quotient(matrix.quants + tile * quants, 4)))], halves
    band, inside = let(quotient(tile, BAND)), let(remainder(tile, BAND))
    whole, _ = HALVED.packed_bytes(16, matrix.columns)
    count = let(T.min(i64(BAND), i64(matrix.tiles) - band * BAND))
    planes = []
    for plane in block.halves or (block,):
        size, _ = plane.packed_bytes(16, matrix.columns)
        at = matrix.quants + band * (BAND * whole) + count * (16 * matrix.columns * plane.before // 8) + inside * size
        planes.append((plane, let(quotient(at, 4))))
    return planes, halves


def _part_of(planes: Planes, at: Value) -> Planes:
    """Where part `at` begins."""
    return [(plane, let(first + at * (plane.part_bytes // 4))) for plane, first in planes]


def _read_part(
    isa: Isa, weights: Weights, block: IntegerBlock, part: Planes, first_scales: Value, at: Value
) -> list[_Group]:
    """Part `at` of a tile, whose scales begin at half `first_scales`."""
    read = [_read_registers(plane, isa, functools.partial(_load_words, weights, first)) for plane, first in part]
    registers = list(map(_joined, *read)) if block.halves else read[0]
    scales = [_read_scale(isa, weights, block, first_scales, at, group) for group in range(PART // block.group_size)]
    count = len(registers) // len(scales)
    return [_Group(registers[index * count : (index + 1) * count], *each) for index, each in enumerate(scales)]


def _load_words(weights: Weights, first: Value, index: int) -> Value:
    return load(weights.words, first + index * 16)


def _joined(high: Value, low: Value) -> Value:
    """The signed bytes of `HALVED`. High halves are below 32: no bit moves into another byte."""
    return let((T.shift_left(high, ints(LOW_BITS)) | low) ^ spread(T.int32(0x80808080 - (1 << 32))))


def _read_scale(
    isa: Isa, weights: Weights, block: IntegerBlock, first_scales: Value, at: Value, group: int, lane: int = 0,
    lanes: int = LANES,
) -> list[Value]:  # fmt: skip
    """The scale of a group in part `at` of a tile, and its minimum, if it has one: of `lanes` rows, from `lane` on."""
    scales = let(first_scales + quotient(at, block.parts) * (block.scale_bytes // 2))
    if block.exponents:
        return [let(_power(load(weights.bytes, scales * 2 + lane, lanes), lanes))]
    numbers = [
        let(isa.from_f16(load(weights.halves, scales + (index * 16 + lane), lanes))) for index in range(block.numbers)
    ]
    if block.unit != 1:
        numbers = [let(each * floats(block.unit, lanes)) for each in numbers]
    if block.offset:
        numbers.append(let(numbers[0] * floats(block.offset, lanes)))
    if not block.factored:
        return numbers
    factors_at = let((scales + block.numbers * 16) * 2 + remainder(at, block.parts) * PART)

    def read(index: int) -> Value:
        return let(T.cast(load(weights.bytes, factors_at + (index * 16 + lane), lanes), f"int32x{lanes}"))

    if block.group_size == PART:
        factors = [read(index) for index in range(block.numbers)]
    elif block.has_minimum:
        stored = read(group)
        factors = [stored & ints(15, lanes), (stored >> ints(4, lanes)) & ints(15, lanes)]
    else:
        factors = [read(group)]
    return [let(d * T.cast(f, f"float32x{lanes}")) for d, f in zip(numbers, factors, strict=True)]


def _power(exponents: Value, lanes: int) -> Value:
    """2^(e − 128) of bytes e, as float32; 0 below 2^−126."""
    exponent = T.cast(exponents, f"int32x{lanes}") & ints(255, lanes)
    return T.reinterpret(f"float32x{lanes}", T.max(exponent - ints(1, lanes), ints(0, lanes)) << ints(23, lanes))


def _read_registers(block: IntegerBlock, isa: Isa, read: Callable[[int], Value]) -> list[Value]:
    """The values 4i … 4i+3 of a part as the 4 bytes of each lane, for every i.

    read: returns the i-th 64 bytes of a packed part as 16 int32 lanes.
    """
    found: list[Value] = []
    for bits, first in zip(block.planes, accumulate(block.planes, initial=0), strict=False):
        words = [let(read(first + index)) for index in range(bits)]
        fields = [let(move_bits(word, bits, at, first)) for at in range(0, 8, bits) for word in words]
        found = [let(low | high) for low, high in zip(found, fields, strict=True)] if found else fields
    return [let(isa.lookup(block.codebook, each)) for each in found] if block.codebook else found


def to_floats(block: FloatBlock, isa: Isa, stored: Value) -> Value:
    """16 stored values of F32, F16 or BF16 (unsigned integers but for F32) as float32."""
    if block.name == "F16":
        return isa.from_f16(stored)
    return shift_to_float(stored, 16) if block.name == "BF16" else stored


def _weights(block: IntegerBlock, groups: Sequence[_Group]) -> Iterator[Value]:
    """The values of a part as floats, one of each row at a time. Unsigned bytes, below 128, are read as signed."""
    for group in groups:
        for register in group.registers:
            for byte in range(4):
                quant = (register << ints(24 - 8 * byte)) >> ints(24)
                weight = T.cast(quant - ints(block.center), "float32x16") * group.scale
                yield weight if group.minimum is None else weight + group.minimum


def _float_weights(
    isa: Isa, weights: Weights, matrix: Matrix, block: FloatBlock, tile: Value, inputs: Inputs,
    rows: Sequence[Value], sums: list[Register], span: Span,
) -> None:  # fmt: skip
    memory = weights.floats if block.raw_bytes == 4 else weights.halves
    first = let(quotient(matrix.quants, block.raw_bytes) + tile * (matrix.columns * 16))
    starts = [let(inputs.start + row * inputs.stride) for row in rows]
    with loop(*span) as at:
        weight = let(to_floats(block, isa, load(memory, first + at * 16)))
        for each, start in zip(sums, starts, strict=True):
            each.value = each.value + weight * spread(inputs.floats[start + at])


def copy_row(isa: Isa, weights: Weights, matrix: Matrix, row: Value, out: Buffer, out_at: Value) -> None:
    """out[out_at : out_at + columns] = row `row` of the matrix: the embedding of a token.

    It unpacks whole tiles and keeps one lane: 16 × the work of a few µs, but the table needs no second copy.
    """
    block, tile, lane = matrix.block, let(quotient(row, 16)), let(remainder(row, 16))
    kept = Register()
    if isinstance(block, FloatBlock):
        memory = weights.floats if block.raw_bytes == 4 else weights.halves
        first = let(quotient(matrix.quants, block.raw_bytes) + tile * (matrix.columns * 16))
        with loop(i64(0), i64(matrix.columns)) as at:
            kept.value = to_floats(block, isa, load(memory, first + at * 16))
            T.buffer_store(out, kept.lane(lane), [out_at + at])
        return
    planes, first_scales = _tile(matrix, block, tile)
    with loop(i64(0), i64(matrix.pieces)) as at:
        part = _part_of(planes, at)
        for index, weight in enumerate(_weights(block, _read_part(isa, weights, block, part, first_scales, at))):
            kept.value = weight
            T.buffer_store(out, kept.lane(lane), [out_at + at * PART + index])
