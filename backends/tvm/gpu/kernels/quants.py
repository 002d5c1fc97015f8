"""Weights in registers: the 32 values of a part, from words that `gpu/weights.py` packed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce as fold
from itertools import accumulate
from operator import or_

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Value,
    as_float,
    f32,
    half,
    i32,
    lane,
    let,
    quotient,
    remainder,
    select,
    to_float,
    to_int,
    to_word,
    u32,
)
from edge.backends.tvm.gpu.weights import Matrix
from edge.backends.tvm.packing.blocks import PART, FloatBlock, IntegerBlock

QUADS = PART // 4  # groups of 4 values in a part


@dataclass(frozen=True)
class Words:
    """A buffer of weights under both of its types: w4 uint32x4, w1 uint32."""

    w4: Buffer
    w1: Buffer

    def load(self, at: Value, count: int) -> list[Value]:
        """`count` words from `at` on; a multiple of 4 if count is one."""
        if count % 4:
            return [let(self.w1[at + index]) for index in range(count)]
        first = let(quotient(at, 4))
        quads = [let(self.w4[first + index]) for index in range(count // 4)]
        return [lane(quad, index) for quad in quads for index in range(4)]

    def floats(self, at: Value, count: int) -> list[Value]:
        """float32 values."""
        return [let(as_float(word)) for word in self.load(at, count)]


@dataclass(frozen=True)
class Scale:
    """A group's weights are scale · (q − center) + minimum."""

    scale: Value
    minimum: Value | None = None


def read_quants(words: Words, matrix: Matrix, row: Value, part: Value) -> list[Value]:
    """The integers q of a part as 8 words of 4 bytes; signed bytes if the block says so."""
    block = matrix.block
    assert isinstance(block, IntegerBlock)
    found: list[Value] = []
    at_part = row * matrix.parts + part
    for bits, first, offset in zip(
        block.planes, accumulate(block.planes, initial=0), matrix.plane_offsets, strict=False
    ):
        plane = words.load(at_part * bits + offset, bits)
        fields = [_field(plane[index % bits], bits, index // bits * bits, first) for index in range(QUADS)]
        found = [low | high for low, high in zip(found, fields, strict=True)] if found else fields
    if block.codebook:
        found = [_looked_up(each, block.codebook) for each in found]
    return [let(each) for each in found]


def _field(word: Value, bits: int, shift: int, place: int) -> Value:
    """In each byte, `bits` bits from bit `shift` on, moved to bit `place`."""
    if bits == 8:
        return word
    mask = u32(((1 << bits) - 1 << place) * 0x01010101)
    if shift > place:
        word = T.shift_right(word, u32(shift - place))
    elif shift < place:
        word = T.shift_left(word, u32(place - shift))
    return T.bitwise_and(word, mask)


def _looked_up(word: Value, codebook: tuple[int, ...]) -> Value:
    """Bytes of 4 bits replaced by signed bytes of the codebook."""
    bytes_of = [_level(_byte(word, index), codebook) for index in range(4)]
    return fold(or_, [T.shift_left(each, u32(8 * index)) for index, each in enumerate(bytes_of)])


def _level(code: Value, codebook: tuple[int, ...]) -> Value:
    """By halving: the word of 4 levels that the upper two bits select, then the byte that the lower two select."""
    code = let(code)
    levels = [level & 255 for level in codebook]
    quads = [u32(sum(levels[4 * quad + index] << 8 * index for index in range(4))) for quad in range(4)]
    low, high = (select(T.bitwise_and(code, u32(4)) != u32(0), quads[i + 1], quads[i]) for i in (0, 2))
    chosen = select(code >= u32(8), high, low)
    return T.bitwise_and(T.shift_right(chosen, T.bitwise_and(code, u32(3)) * u32(8)), u32(255))


def _byte(word: Value, index: int) -> Value:
    return T.bitwise_and(T.shift_right(word, u32(8 * index)) if index else word, u32(255))


def byte_values(word: Value, *, signed: bool) -> list[Value]:
    """The 4 bytes of a word as float32."""
    if not signed:
        return [to_float(to_int(_byte(word, index))) for index in range(4)]
    number = let(to_int(word))
    return [to_float(_signed_byte(number, index)) for index in range(4)]


def _signed_byte(number: Value, index: int) -> Value:
    """Of an int32."""
    return T.shift_right(T.shift_left(number, i32(24 - 8 * index)) if index < 3 else number, i32(24))


def read_scales(words: Words, matrix: Matrix, row: Value, part: Value) -> list[Scale]:
    """Of the groups of a part: one of 32 values, or two of 16."""
    block = matrix.block
    assert isinstance(block, IntegerBlock)
    number = row * matrix.number_words + matrix.numbers
    index = quotient(part, block.parts)
    if block.numbers == 2:
        word = let(words.w1[number + index])
        numbers = [let(half(word, 0)), let(half(word, 1))]
    else:
        numbers = [let(half(words.w1[number + quotient(index, 2)], remainder(index, 2)))]
    if block.parts == 1:
        return [Scale(*numbers)]
    factor = words.w1[row * matrix.factor_words + (quotient(part, 2) + matrix.factors)]
    two = let(T.shift_right(factor, to_word(remainder(part, 2)) * u32(16)))  # in the low half
    if block.group_size == PART:
        return [Scale(*(let(number * to_float(to_int(_byte(two, i)))) for i, number in enumerate(numbers)))]
    if block.has_minimum:  # two numbers of 4 bits in each byte
        nibbles = [T.bitwise_and(T.shift_right(two, u32(4 * i)), u32(15)) for i in range(4)]
        factors = [to_float(to_int(each)) for each in nibbles]
        return [Scale(let(numbers[0] * factors[i]), let(numbers[1] * factors[i + 1])) for i in (0, 2)]
    signed = let(to_int(two))
    return [Scale(let(numbers[0] * to_float(_signed_byte(signed, i)))) for i in (0, 1)]


def read_floats(words: Words, matrix: Matrix, row: Value, part: Value) -> list[Value]:
    """The 32 values of a part of F32, F16 or BF16."""
    bits = matrix.planes[0]
    loaded = words.load((row * matrix.parts + part) * bits + matrix.at, bits)
    if matrix.kind == "F32":
        return [as_float(word) for word in loaded]
    if matrix.kind == "F16":
        return [half(word, which) for word in loaded for which in (0, 1)]
    assert matrix.kind == "BF16"
    high = u32(0xFFFF0000)
    return [as_float(each) for word in loaded for each in (T.shift_left(word, u32(16)), T.bitwise_and(word, high))]


def read_values(words: Words, matrix: Matrix, row: Value, part: Value) -> list[Value]:
    """The 32 weights of a part as float32."""
    block = matrix.block
    if isinstance(block, FloatBlock):
        return read_floats(words, matrix, row, part)
    quants, scales = read_quants(words, matrix, row, part), read_scales(words, matrix, row, part)
    values = [value for word in quants for value in byte_values(word, signed=block.signed)]
    size, center = block.group_size, f32(float(block.center))
    found = []
    for index, value in enumerate(values):
        group = scales[index // size]
        scaled = group.scale * (value - center if block.center else value)
        found.append(scaled if group.minimum is None else scaled + group.minimum)
    return found


def dot_part(words: Words, matrix: Matrix, row: Value, part: Value, x: list[Value], x_sums: list[Value]) -> Value:
    """A part's product with 32 activations. x_sums: of each 16 of them; used where a block has a center or minima."""
    block = matrix.block
    if isinstance(block, FloatBlock):
        return _dot(read_floats(words, matrix, row, part), x)
    quants, scales = read_quants(words, matrix, row, part), read_scales(words, matrix, row, part)
    each = QUADS // len(scales)
    total = f32(0.0)
    for index, group in enumerate(scales):
        own = quants[index * each : (index + 1) * each]
        values = [value for word in own for value in byte_values(word, signed=block.signed)]
        product = _dot(values, x[index * each * 4 : (index + 1) * each * 4])
        own_sum = x_sums[index] if len(scales) == 2 else x_sums[0] + x_sums[1]
        if block.center:
            product = product - f32(float(block.center)) * own_sum
        total = total + group.scale * product
        if group.minimum is not None:
            total = total + group.minimum * own_sum
    return let(total)


def _dot(a: list[Value], b: list[Value]) -> Value:
    products = [one * other for one, other in zip(a, b, strict=True)]
    return let(fold(lambda one, other: one + other, products))
