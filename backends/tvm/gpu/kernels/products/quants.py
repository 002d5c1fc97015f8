"""Dequantization in registers: the 32 values of a part as 8 vectors of 4, from words that `gpu/weights.py` packed.

All of it is element-wise vector arithmetic, which means the same in every language.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Register,
    Value,
    as_float,
    call,
    f32,
    half,
    hold,
    i32,
    is_vector,
    join,
    lane,
    let,
    quotient,
    remainder,
    spread,
    to_float,
    to_int,
    to_word,
    total,
    u32,
)
from edge.backends.tvm.gpu.weights import Matrix, Vector
from edge.backends.tvm.packing.blocks import PART, Block, FloatBlock, IntegerBlock

QUADS = PART // 4  # vectors of a part
_BF16_BITS = 7  # of a mantissa


@dataclass(frozen=True)
class Words:
    """A buffer of weights under both of its types: w4 uint32x4, w1 uint32.

    column: if not None, only this word of each 4 is read, and values are scalars instead of vectors.
    """

    w4: Buffer
    w1: Buffer
    column: Value | None = None

    def quad(self, at: Value) -> Value:
        """4 words, or the column's one."""
        return let(self.w4[at] if self.column is None else self.w1[at * 4 + self.column])

    def vector(self, vector: Vector, part: Value) -> list[Value]:
        """32 float32 values, in vectors of 4."""
        at = let(part * QUADS + vector.at // 4)
        return [as_floats(let(self.w4[at + index])) for index in range(QUADS)]

    def vector_quad(self, vector: Vector, at: Value) -> Value:
        """Values 4 · at …"""
        return as_floats(let(self.w4[at + vector.at // 4]))

    def value(self, vector: Vector, at: Value) -> Value:
        """One float32 value."""
        return as_float(self.w1[at + vector.at])


@dataclass(frozen=True)
class Scale:
    """The scale of a group, whose weights are scale · (q − center) + minimum."""

    scale: Value
    minimum: Value | None = None


@dataclass(frozen=True)
class Raw:
    """A part of quantized weights as it lies in memory: quads of its planes, words of its scales."""

    quads: list[Value]
    words: list[Value]


def as_floats(words: Value) -> Value:
    """Reinterpret words as float32."""
    return T.reinterpret(_alike("float32", words), words)


def _signed(quad: Value) -> Value:
    """4 words as int32, which CPUs convert to floats faster than uint32."""
    return _held(T.reinterpret(_alike("int32", quad), quad))


def _alike(dtype: str, value: Value) -> str:
    """The dtype of a scalar or of a vector, as the value is."""
    return dtype + "x4" * is_vector(value)


def _held(value: Value) -> Value:
    return hold(value, str(value.ty.dtype))


def _spread(scalar: Value, value: Value) -> Value:
    """The scalar as a vector, if the value is one."""
    return spread(scalar) if is_vector(value) else scalar


def read_values(words: Words, matrix: Matrix, row: Value, part: Value) -> list[Value]:
    """The 32 weights of a part as float32, in vectors of 4."""
    block = matrix.block
    if isinstance(block, FloatBlock):
        return _read_floats(words, matrix, row, part)
    raw = _fetch(words, matrix, row, part)
    quants, scales = _centered(raw, matrix, part), scales_of(raw, matrix, part)
    found = []
    for index, quant in enumerate(quants):
        group = scales[index * len(scales) // QUADS]
        scaled = _spread(group.scale, quant) * quant
        found.append(scaled if group.minimum is None else scaled + _spread(group.minimum, quant))
    return found


def is_scaled(block: Block) -> bool:
    """Whether weights are scaled integers of at most 8 bits and a sign, without a minimum."""
    return isinstance(block, IntegerBlock) and not block.has_minimum


def read_scaled(words: Words, matrix: Matrix, row: Value, part: Value) -> tuple[list[Value], list[Value]]:
    """The integers of a part, as `read_values` returns weights, and the scales of its halves, or of all. For blocks
    that are `is_scaled`."""
    raw = _fetch(words, matrix, row, part)
    return _centered(raw, matrix, part), [each.scale for each in scales_of(raw, matrix, part)]


def needs_sums(block: Block) -> bool:
    """Whether products with this block type need the sums of activations."""
    return isinstance(block, IntegerBlock) and (block.center != 0 or block.has_minimum)


def sum_halves(x: Sequence[Value]) -> list[Value]:
    """Sums of the first and of the last 16 values of a part."""
    return [hold(total(_tree(x[first : first + QUADS // 2]))) for first in (0, QUADS // 2)]


@dataclass(frozen=True)
class Weights:
    """A part of a row for `Sum`, in vectors of 4: floats, or integers q with the scales of their groups."""

    values: list[Value]
    scales: list[Scale]

    @classmethod
    def read(cls, words: Words, matrix: Matrix, row: Value, part: Value) -> Weights:
        if isinstance(matrix.block, FloatBlock):
            return cls(_read_floats(words, matrix, row, part), [])
        raw = _fetch(words, matrix, row, part)
        return cls(_quants(raw, matrix, part), scales_of(raw, matrix, part))

    def held(self) -> Weights:
        """Decoded once, for several tokens."""
        return Weights([_held(each) for each in self.values], self.scales)


class Sum:
    """The accumulator of a row's product; vectors are added element-wise until the end."""

    def __init__(self) -> None:
        self._vector = Register(spread(f32(0.0)), "float32x4")
        self._rest = Register(f32(0.0))

    @property
    def value(self) -> Value:
        return total(self._vector.value) + self._rest.value

    def add(self, block: Block, weights: Weights, x: Sequence[Value], sums: Sequence[Value]) -> None:
        """Add a part's product with 32 activations, in vectors of 4. sums: `sum_halves` of them, where the block needs
        it."""
        quants, scales = weights.values, weights.scales
        if not isinstance(block, IntegerBlock):
            for weight, each in zip(quants, x, strict=True):
                self._vector.value = self._vector.value + weight * each
            return
        count = QUADS // len(scales)
        for index, group in enumerate(scales):
            product = Register(quants[index * count] * x[index * count], "float32x4")
            for at in range(index * count + 1, (index + 1) * count):
                product.value = product.value + quants[at] * x[at]
            self._vector.value = self._vector.value + spread(group.scale) * product.value
            if needs_sums(block):
                factor = group.scale * f32(-float(block.center)) if block.center else group.minimum
                self._rest.value = self._rest.value + factor * (sums[index] if len(scales) == 2 else sums[0] + sums[1])


def _tree(vectors: Sequence[Value]) -> Value:
    return fold(lambda one, other: one + other, vectors)


def _read_floats(words: Words, matrix: Matrix, row: Value, part: Value) -> list[Value]:
    """The 32 values of a part of F32, F16 or BF16, in vectors of 4."""
    count = matrix.planes[0] // 4
    at = let(row * matrix.plane_quads[0] + part * count + matrix.at // 4)
    quads = [words.quad(at + index) for index in range(count)]
    return [each for quad in quads for each in floats_of(quad, matrix.kind)]


def floats_of(quad: Value, kind: str) -> list[Value]:
    """The values in 4 words of F32, F16 or BF16, in vectors of 4; in one word, scalars."""
    if kind == "F32":
        return [as_floats(quad)]
    if kind == "F16" and not is_vector(quad):
        return [half(quad, which) for which in (0, 1)]
    if kind == "F16":
        return [join([half(lane(quad, index), which) for index in range(4)]) for which in (0, 1)]
    assert kind == "BF16"
    high, by = _spread(u32(0xFFFF0000), quad), _spread(u32(16), quad)
    return [as_floats(_held(each)) for each in (T.shift_left(quad, by), T.bitwise_and(quad, high))]


def raw_sizes(block: Block) -> tuple[int, int]:
    """Quads and words of a part's `Raw`."""
    assert isinstance(block, IntegerBlock)
    return 2 if block.planes == (8,) else len(block.planes), 1 + block.factored


def has_minimum(block: Block) -> bool:
    return isinstance(block, IntegerBlock) and block.has_minimum


def places(matrix: Matrix, row: Value, part: Value) -> tuple[list[Value], list[Value]]:
    """Where a part's `Raw` lies: indices of quads, and of words."""
    block = matrix.block
    assert isinstance(block, IntegerBlock)
    if block.planes == (8,):
        at = let(row * matrix.plane_quads[0] + part * 2 + matrix.at // 4)
        quads = [at, at + 1]
    else:
        planes = zip(matrix.planes, matrix.plane_quads, matrix.plane_offsets, strict=True)
        quads = [row * count + quotient(part, 4 // bits) + start // 4 for bits, count, start in planes]
    index, together = quotient(part, block.parts), 1 if block.numbers == 2 else 4 if block.exponents else 2
    words = [row * matrix.number_words + matrix.numbers + quotient(index, together)]
    if block.factored:
        words.append(row * matrix.factor_words + (quotient(part, 2) + matrix.factors))
    return quads, words


def _fetch(words: Words, matrix: Matrix, row: Value, part: Value) -> Raw:
    quads, singles = places(matrix, row, part)
    return Raw([words.quad(at) for at in quads], [let(words.w1[at]) for at in singles])


def bf16_pairs(raw: Raw, matrix: Matrix, part: Value) -> list[list[Value]]:
    """The integers q − center of a part as pairs of bfloat16: 4 lists of 4 words. Word i of list 2h + j has the values
    16h + 4j + i, in its low half, and 16h + 4(j + 2) + i."""
    block = matrix.block
    assert isinstance(block, IntegerBlock)
    halves = [(h, j) for h in range(2) for j in range(2)]
    if sum(block.planes) > _BF16_BITS or block.codebook:
        quants = _centered(raw, matrix, part)
        return [
            [call("uint32", "edge_bf16", lane(quants[4 * h + j], i), lane(quants[4 * h + j + 2], i)) for i in range(4)]
            for h, j in halves
        ]
    planes, minus = _planes(raw, matrix, part), u32((0xC300 + block.center) * 0x10001)  # −128 − center
    mask = u32(((1 << sum(block.planes)) - 1) * 0x10001)
    found = []
    for h, j in halves:
        if len(planes) == 1:  # the function's mask suffices
            bits, _, quad = planes[0]
            value = _shifted(quad, j * 8 + h * bits)
        else:
            value = fold(T.bitwise_or, _fields(planes, h, j, repeated=0x10001))
        codes = hold(T.reinterpret("uint32x4", value), "uint32x4")
        found.append([call("uint32", "edge_bf16_of", lane(codes, i), mask, minus) for i in range(4)])
    return found


def _centered(raw: Raw, matrix: Matrix, part: Value) -> list[Value]:
    """The integers q − center of a part as float32."""
    quants = _quants(raw, matrix, part)
    center = matrix.block.center if isinstance(matrix.block, IntegerBlock) else 0
    return [quant - _spread(f32(float(center)), quant) for quant in quants] if center else quants


def _quants(raw: Raw, matrix: Matrix, part: Value) -> list[Value]:
    """The integers q of a part as float32, in vectors of 4."""
    block = matrix.block
    assert isinstance(block, IntegerBlock)
    if block.planes == (8,):
        assert block.signed
        quads = [_signed(each) for each in raw.quads[:2]]
        return [_to_floats(_top_byte(quad, i32(24 - 8 * byte))) for quad in quads for byte in range(4)]
    planes = _planes(raw, matrix, part)
    found = []
    for index in range(QUADS):
        value = fold(T.bitwise_or, _fields(planes, index // 4, index % 4))
        found.append(_to_floats(_levels(value, block.codebook) if block.codebook else value))
    return found


def _planes(raw: Raw, matrix: Matrix, part: Value) -> list[tuple[int, int, Value]]:
    """Each plane's bits, its lowest bit in a code, and its quad, shifted so that the part comes first."""
    found, low = [], 0
    for bits, quad in zip(matrix.planes, raw.quads, strict=False):
        together, signed = 4 // bits, _signed(quad)
        if together > 1:
            by = _spread(remainder(part, together) * (2 * bits), signed)
            signed = _held(T.shift_right(signed, by))
        found.append((bits, low, signed))
        low += bits
    return found


def _fields(planes: Sequence[tuple[int, int, Value]], half: int, byte: int, repeated: int = 1) -> list[Value]:
    """The planes' bits of the codes of a byte's half. repeated: a factor of the masks that repeats them."""
    return [_field(quad, bits, byte * 8 + half * bits, low, repeated) for bits, low, quad in planes]


def _field(quad: Value, bits: int, first: int, place: int, repeated: int) -> Value:
    """`bits` bits from bit `first` on, moved to bit `place`."""
    mask = ((1 << bits) - 1 << place) * repeated
    return T.bitwise_and(_shifted(quad, first - place), _spread(i32(mask), quad))


def _shifted(quad: Value, right: int) -> Value:
    """Shifted right, or left where `right` is negative."""
    if right < 0:
        return T.shift_left(quad, _spread(i32(-right), quad))
    return T.shift_right(quad, _spread(i32(right), quad)) if right else quad


def _to_floats(words: Value) -> Value:
    return T.cast(words, _alike("float32", words))


def _top_byte(quad: Value, left: Value) -> Value:
    """The highest byte of each word, signed, after a left shift by a scalar."""
    return T.shift_right(T.shift_left(quad, _spread(left, quad)), _spread(i32(24), quad))


def _levels(codes: Value, codebook: tuple[int, ...]) -> Value:
    """Decode 4-bit codes by the codebook.

    Each word has 4 levels as its bytes; the upper bits of a code choose the word, the lower ones the byte.
    """
    codes = _held(codes)
    levels = [level & 255 for level in codebook]
    four = [_as_signed(sum(levels[4 * word + index] << 8 * index for index in range(4))) for word in range(4)]
    by_4, by_8 = (_held(_all_if(codes, bit)) for bit in (2, 3))
    low, high = (
        _chosen(by_4, *(_spread(i32(each), codes) for each in (four[at], four[at] ^ four[at + 1]))) for at in (0, 2)
    )
    low = _held(low)
    word = _chosen(by_8, low, T.bitwise_xor(low, high))
    place = T.bitwise_and(codes, _spread(i32(3), codes))
    left = _spread(i32(24), codes) - place * _spread(i32(8), codes)
    return T.shift_right(T.shift_left(word, left), _spread(i32(24), word))


def _all_if(words: Value, bit: int) -> Value:
    """All bits set in words that have this bit set, otherwise none."""
    return T.shift_right(T.shift_left(words, _spread(i32(31 - bit), words)), _spread(i32(31), words))


def _as_signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def _chosen(mask: Value, one: Value, difference: Value) -> Value:
    """`one` where the mask is zero, otherwise `one` with the bits of `difference` flipped."""
    return T.bitwise_xor(one, T.bitwise_and(mask, difference))


def scales_of(raw: Raw, matrix: Matrix, part: Value) -> list[Scale]:
    """The scales of a part's groups: one of 32 values, or two of 16."""
    block, word = matrix.block, raw.words[0]
    assert isinstance(block, IntegerBlock)
    index = quotient(part, block.parts)
    if block.numbers == 2:
        numbers = [hold(half(word, which)) for which in (0, 1)]
    elif block.exponents:
        numbers = [_power(word, remainder(index, 4))]
    else:
        numbers = [hold(half(word, remainder(index, 2)))]
    if block.unit != 1:
        numbers = [hold(each * f32(block.unit)) for each in numbers]
    if not block.factored:
        return [Scale(*numbers)]
    two = hold(T.shift_right(raw.words[1], to_word(remainder(part, 2)) * u32(16)), "uint32")  # in the low half
    if block.group_size == PART and block.has_minimum:
        return [Scale(*(hold(each * _small(two, 8 * at, 255)) for at, each in enumerate(numbers)))]
    if block.has_minimum:  # two numbers of 4 bits in each byte
        factors = [_small(two, 4 * at, 15) for at in range(4)]
        return [Scale(hold(numbers[0] * factors[at]), hold(numbers[1] * factors[at + 1])) for at in (0, 2)]
    signed = [
        T.shift_right(T.shift_left(to_int(two), i32(24 - 8 * at)), i32(24)) for at in range(PART // block.group_size)
    ]
    return [Scale(hold(numbers[0] * to_float(each))) for each in signed]


def _power(word: Value, which: Value) -> Value:
    """2^(byte − 128); 0 for the bytes 0 and 1, whose powers are denormal."""
    byte = to_int(T.bitwise_and(T.shift_right(word, to_word(which) * u32(8)), u32(255)))
    return hold(as_float(to_word(T.shift_left(T.max(byte - 1, i32(0)), i32(23)))))


def _small(word: Value, shift: int, mask: int) -> Value:
    """Some bits of a word as float32."""
    return to_float(to_int(T.bitwise_and(T.shift_right(word, u32(shift)) if shift else word, u32(mask))))
