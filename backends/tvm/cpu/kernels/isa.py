"""The differences between instruction sets: the dot product of bytes, and float16. Each set is a class."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import (
    LANES,
    Value,
    floats,
    half,
    ints,
    lanes_of,
    let,
    pinned,
    pins,
    pure,
    spread,
)


class Isa(Protocol):
    """16 int32 lanes hold 4 weights each; a word of x is one int32 of 4 signed bytes, the same for all lanes."""

    pins: str  # LLVM IR for what is `pinned`
    signed_offset: int  # added by `dot` to every signed weight; the caller subtracts its product with the sum of x

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        """start + Σ weights · x, over the 4 bytes of each lane and over the pairs of weights and words of x, for each
        token's start and words of x, in order; each token's code is emitted on demand.

        largest: the largest weight, if weights are unsigned and below 128. None: they are signed, and the result is
        too large by signed_offset · Σ x.
        """
        ...

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        """table[byte], signed, for each of the 4 bytes (0 … 15) of int32 lanes."""
        ...

    def from_f16(self, stored: Value) -> Value:
        """Lanes of uint16 that hold float16, as float32."""
        ...

    def to_f16(self, values: Value) -> Value:
        """16 float32 lanes rounded to float16, as uint16."""
        ...


class Generic:
    """Plain vector arithmetic, which LLVM compiles for every CPU."""

    pins = ""
    signed_offset = 0

    def dot(self, sums: Value, weights: Sequence[Value], x: Sequence[Value], largest: int | None) -> Value:
        for register, word in zip(weights, x, strict=True):
            for byte in range(4):
                scalar = (word << T.int32(24 - 8 * byte)) >> T.int32(24)
                weight = (register << ints(24 - 8 * byte)) >> ints(24)  # unsigned ones have no sign bit
                sums = let(sums + weight * spread(scalar))
        return sums

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        for start, words in zip(starts, x, strict=True):
            yield self.dot(start, weights, words, largest)

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        index, found = let(T.reinterpret("int8x64", indices)), spread(T.int8(table[0]), 64)
        for number, entry in enumerate(table[1:], start=1):
            found = let(T.Select(index == spread(T.int8(number), 64), spread(T.int8(entry), 64), found))
        return T.reinterpret("int32x16", found)

    def from_f16(self, stored: Value) -> Value:
        """Exponent and fraction, read as those of a float32, are too small by 2^112; infinities are handled apart."""
        bits = let(T.cast(stored, "int32x16"))
        sign = (bits & ints(0x8000)) << ints(16)
        magnitude = let((bits & ints(0x7FFF)) << ints(13))
        finite = T.reinterpret("int32x16", T.reinterpret("float32x16", magnitude) * floats(2.0**112))
        special = magnitude | ints(0x7F800000)
        return T.reinterpret("float32x16", sign | T.Select(magnitude >= ints(0x0F800000), special, finite))

    def to_f16(self, values: Value) -> Value:
        """Round to nearest, ties to even."""
        bits = let(T.reinterpret("int32x16", values))
        sign = (bits >> ints(16)) & ints(0x8000)
        magnitude = let(bits & ints(0x7FFFFFFF))
        normal = (magnitude + ints(0x0FFF - (112 << 23)) + ((magnitude >> ints(13)) & ints(1))) >> ints(13)
        # Adding 0.5 leaves the 10 bits of a subnormal half at the end of the sum's fraction.
        tiny = T.reinterpret("int32x16", T.reinterpret("float32x16", magnitude) + floats(0.5)) - ints(0x3F000000)
        special = T.Select(magnitude > ints(0x7F800000), ints(0x7E00), ints(0x7C00))
        small = T.Select(magnitude < ints(0x38800000), tiny, normal)
        return T.cast(sign | T.Select(magnitude >= ints(0x47800000), special, small), "uint16x16")


class _Float16Instructions(Generic):
    """CPUs with instructions that convert float16."""

    def from_f16(self, stored: Value) -> Value:
        return T.cast(T.reinterpret("float16x16", stored), "float32x16")

    def to_f16(self, values: Value) -> Value:
        return T.reinterpret("uint16x16", T.cast(values, "float16x16"))


class Avx2(_Float16Instructions):
    """vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits: weights below 129 cannot overflow."""

    pins = pins("x", "int32x8")

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        """8 of the 16 rows for all tokens, then the others: the weights of both halves, with all else, would not fit in
        16 registers, and LLVM's own order takes them together."""
        halves = []
        for which in (0, 1):
            registers = [half(weight, which, "int32x8") for weight in weights]
            halves.append([pinned(self._half(registers, words, largest)) for words in x])
        for start, *both in zip(starts, *halves, strict=True):
            yield let(start + T.vectorcombine("int32x16", *both))

    def _half(self, weights: Sequence[Value], x: Sequence[Value], largest: int | None) -> Value:
        """The products of 8 rows and one token."""
        pairs = [self._pairs(w, spread(word, 8), largest) for w, word in zip(weights, x, strict=True)]
        # Sums stay in 16 bits as long as they fit.
        fit = 1 if largest is None else ((1 << 15) - 1) // (2 * largest * 127)
        pairs = [functools.reduce(_add, pairs[at : at + fit]) for at in range(0, len(pairs), fit)]
        return functools.reduce(_add, map(self._widened, pairs))

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        bytes_of = T.reinterpret("int8x32", _repeated(table, 8))
        halves = [T.reinterpret("int8x32", half(indices, which, "int32x8")) for which in (0, 1)]
        found = [pure("int8x32", "llvm.x86.avx2.pshuf.b", bytes_of, each) for each in halves]
        return T.vectorcombine("int32x16", *(T.reinterpret("int32x8", each) for each in found))

    def _pairs(self, weights: Value, x: Value, largest: int | None) -> Value:
        w, signs = T.reinterpret("int8x32", weights), T.reinterpret("int8x32", x)
        if largest is None:
            signs = pure("int8x32", "llvm.x86.avx2.psign.b", signs, w)
            w = pure("int8x32", "llvm.x86.avx2.psign.b", w, w)  # |w|; 128 as an unsigned byte for -128
        return let(pure("int16x16", "llvm.x86.avx2.pmadd.ub.sw", w, signs))

    def _widened(self, pairs: Value) -> Value:
        return pure("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, spread(T.int16(1), 16))


class Avx512Vnni(_Float16Instructions):
    """vpdpbusd: 16 sums of 4 products of an unsigned and a signed byte."""

    signed_offset = 128

    def dot(self, sums: Value, weights: Sequence[Value], x: Sequence[Value], largest: int | None) -> Value:
        for register, word in zip(weights, x, strict=True):
            sums = self.products(sums, _unsigned(register, largest), spread(word))
        return sums

    def products(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        """sums + the products of the four bytes of each lane."""
        bytes_of = (T.reinterpret("int8x64", each) for each in (unsigned, signed))
        return let(pure("int32x16", "llvm.x86.avx512.vpdpbusd.512", sums, *bytes_of))

    def quadruples(self, lines: Value) -> Value:
        """4 lines of 16 bytes, transposed: a lane has the bytes of one place."""
        places = [4 * line + place for place in range(4) for line in range(4)]
        words, order = T.Shuffle([let(T.reinterpret("int32x16", lines))], places), _repeated(places, 16)
        bytes_of = (T.reinterpret("int8x64", let(each)) for each in (words, order))
        return let(T.reinterpret("int32x16", pure("int8x64", "llvm.x86.avx512.pshuf.b.512", *bytes_of)))

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        arguments = (T.reinterpret("int8x64", _repeated(table, 16)), T.reinterpret("int8x64", indices))
        return T.reinterpret("int32x16", pure("int8x64", "llvm.x86.avx512.pshuf.b.512", *arguments))


class Avx512Bf16(Avx512Vnni):
    """vdpbf16ps: 16 sums of 2 products of BF16. A lane holds a pair; the type of its 32 bits is float32 here."""

    pins = """
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)

define <16 x float> @edge_pair(<16 x float> %first, <16 x float> %second) alwaysinline {
  %both = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %second, <16 x float> %first)
  %bits = bitcast <32 x bfloat> %both to <32 x i16>
  %pairs = shufflevector <32 x i16> %bits, <32 x i16> poison, <32 x i32> <PAIRS>
  %lanes = bitcast <32 x i16> %pairs to <16 x float>
  ret <16 x float> %lanes
}

define <8 x float> @edge_neighbours(<16 x float> %values) alwaysinline {
  %short = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %values)
  %lanes = bitcast <16 x bfloat> %short to <8 x float>
  ret <8 x float> %lanes
}

define <16 x float> @edge_dot_pairs(<16 x float> %sums, <16 x float> %a, <16 x float> %b) alwaysinline {
  %x = bitcast <16 x float> %a to <32 x bfloat>
  %y = bitcast <16 x float> %b to <32 x bfloat>
  %more = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %more
}
""".replace("PAIRS", ", ".join(f"i32 {lane}, i32 {lane + 16}" for lane in range(16)))

    def pair(self, first: Value, second: Value) -> Value:
        """Each lane of both vectors as a pair."""
        return let(T.call_extern("float32x16", "edge_pair", first, second))

    def neighbours(self, values: Value) -> Value:
        """Neighbouring lanes as 8 pairs."""
        return let(T.call_extern("float32x8", "edge_neighbours", values))

    def dot_pairs(self, sums: Value, a: Value, b: Value) -> Value:
        """sums + the products of both halves of each lane, float32."""
        return let(T.call_extern("float32x16", "edge_dot_pairs", sums, a, b))


def _add(a: Value, b: Value) -> Value:
    return let(a + b)


def _repeated(table: Sequence[int], lanes: int) -> Value:
    """16 signed bytes as 4 int32 lanes, repeated."""
    words = np.array(table, np.int8).view("<i4").tolist()
    return T.Shuffle([ints(word, 4) for word in words], [4 * (lane % 4) for lane in range(lanes)])


class AvxVnni(Avx2):
    """AVX2 with vpdpbusd, on registers of 256 bits."""

    signed_offset = 128

    def _half(self, weights: Sequence[Value], x: Sequence[Value], largest: int | None) -> Value:
        sums = ints(0, 8)
        for register, word in zip(weights, x, strict=True):
            arguments = (T.reinterpret("int8x32", each) for each in (_unsigned(register, largest), spread(word, 8)))
            sums = let(pure("int32x8", "llvm.x86.avx512.vpdpbusd.256", sums, *arguments))
        return sums


def _unsigned(weights: Value, largest: int | None) -> Value:
    """Bytes for vpdpbusd, which takes unsigned ones: 128 is added to signed bytes."""
    return weights if largest is not None else let(weights ^ ints(-0x7F7F7F80, lanes_of(weights)))  # 0x80808080


class Neon(_Float16Instructions):
    """ARM64: 32 registers of 128 bits, which a block's weights would fill. So each serves every token in turn."""

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        """smull: products are added in 16 bits as long as they fit: two of signed bytes, all of a block of nibbles."""
        sums = [_quarters(start) for start in starts]
        room = ((1 << 15) - 1) // (127 * (128 if largest is None else largest))
        for first in range(0, len(weights), room):
            group = [_quarters(register) for register in weights[first : first + room]]
            for token, words in zip(sums, x, strict=True):
                scalars = [T.reinterpret("int8x8", spread(word, 2)) for word in words[first : first + room]]
                for quarter in range(4):
                    parts = [
                        self._products([half(_bytes(each[quarter]), which, "int8x8") for each in group], scalars)
                        for which in (0, 1)
                    ]
                    token[quarter] = let(token[quarter] + pure("int32x4", "llvm.aarch64.neon.addp", *parts))
        return map(_joined, sums)

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        entries = _bytes(_repeated(table, 4))
        found = [pure("int8x16", "llvm.aarch64.neon.tbl1", entries, _bytes(each)) for each in _quarters(indices)]
        return _joined([T.reinterpret("int32x4", each) for each in found])

    def _products(self, weights: Sequence[Value], x: Sequence[Value]) -> Value:
        """Sums of 2 neighbouring products each, over all weights: int32x4 from pairs of int8x8."""
        each = (pure("int16x8", "llvm.aarch64.neon.smull", *pair) for pair in zip(weights, x, strict=True))
        return pure("int32x4", "llvm.aarch64.neon.saddlp", functools.reduce(_add, each))


class DotProd(Neon):
    """sdot: 4 sums of 4 products of signed bytes."""

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        sums = [_quarters(start) for start in starts]
        for index, register in enumerate(weights):
            quarters = [_bytes(each) for each in _quarters(register)]
            for token, words in zip(sums, x, strict=True):
                scalar = _bytes(let(spread(words[index], 4)))
                for number, quarter in enumerate(quarters):
                    token[number] = let(pure("int32x4", "llvm.aarch64.neon.sdot", token[number], quarter, scalar))
        return map(_joined, sums)


class I8mm(DotProd):
    """smmla: [2, 8] · [2, 8]ᵀ of signed bytes, here two tokens · two rows. A single token uses sdot."""

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        """Pairs of registers are interleaved so that 8 bytes hold 8 values of one row; they meet pairs of words."""
        if len(starts) % 2:
            return super().dots(starts, weights, x, largest)
        pairs = range(0, len(starts), 2)
        sums = [_crossed(starts[pair], starts[pair + 1], _TOKENS) for pair in pairs]
        for index in range(0, len(weights), 2):
            rows = [_bytes(each) for each in _crossed(weights[index], weights[index + 1], _ROWS)]
            for pair, products in zip(pairs, sums, strict=True):
                four = [words[at] for words in x[pair : pair + 2] for at in (index, index + 1)]
                tokens = _bytes(let(T.Shuffle(four, list(range(4)))))
                for number, row in enumerate(rows):
                    products[number] = let(pure("int32x4", "llvm.aarch64.neon.smmla", products[number], tokens, row))
        return (_joined(each) for products in sums for each in _uncrossed(products))


# How the lanes of two registers (0 … 3, 4 … 7) are combined into two others.
_ROWS = (0, 4, 1, 5), (2, 6, 3, 7)  # 8 bytes of a row, 4 from each
_TOKENS = (0, 1, 4, 5), (2, 3, 6, 7)  # two rows' sums of one token, and of the other; its own inverse


def _crossed(first: Value, second: Value, orders: tuple[tuple[int, ...], ...]) -> list[Value]:
    """Two vectors of 16 int32 lanes as 8 of 4, with lanes of both in each."""
    pairs = zip(_quarters(first), _quarters(second), strict=True)
    return [let(T.Shuffle(pair, order)) for pair in pairs for order in orders]


def _uncrossed(products: Sequence[Value]) -> list[list[Value]]:
    """The quarters of two tokens' sums."""
    pairs = [products[at : at + 2] for at in range(0, 8, 2)]
    return [[let(T.Shuffle(pair, order)) for pair in pairs] for order in _TOKENS]


def _bytes(quarter: Value) -> Value:
    return T.reinterpret("int8x16", quarter)


def _quarters(vector: Value) -> list[Value]:
    """16 int32 lanes as 4 vectors of 4."""
    halves = [half(vector, which, "int32x8") for which in (0, 1)]
    return [let(half(each, which, "int32x4")) for each in halves for which in (0, 1)]


def _joined(quarters: Sequence[Value]) -> Value:
    a, b = (T.vectorcombine("int32x8", *quarters[at : at + 2]) for at in (0, 2))
    return let(T.vectorcombine("int32x16", a, b))


class Dots(Protocol):
    """Sums of dot products of 4 rows while they grow, in registers of 128 bits."""

    def add(self, weights: Value, x: Value) -> None:
        """weights: int32x4, each lane 4 weights of a row; x: of `Simd128.operand`."""
        ...

    def pin(self) -> None:
        """Compute all of the sums here, before what follows."""
        ...

    def total(self) -> Value:
        """int32x4. Nothing is added afterwards."""
        ...


class Simd128(Generic):
    """WebAssembly: registers of 128 bits, and no dot product of bytes but of 16 bits.

    `matmul.py` has loops of its own for these: engines of browsers keep values in registers only if code uses them
    soon.
    """

    pins = pins("r", "int16x8", "int32x4", "float32x4")
    _swizzle = "llvm.wasm.swizzle"

    def operand(self, word: Value, largest: int | None) -> Value:
        """A word of x, for every row."""
        return let(_wide(T.reinterpret("int8x8", spread(word, 2))))

    def sums(self, largest: int | None) -> Dots:
        """largest: as in `Isa.dots`; signed weights have no offset."""
        return _WideDots()

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        if lanes_of(indices) == LANES:
            return _joined([self.lookup(table, each) for each in _quarters(indices)])
        entries = _bytes(_repeated(table, 4))
        return T.reinterpret("int32x4", pure("int8x16", self._swizzle, entries, _bytes(indices)))

    def from_f16(self, stored: Value) -> Value:
        """Exponent and fraction, read as those of a float32, are too small by 2^112. Infinities become 65536."""
        lanes = lanes_of(stored)
        bits = T.cast(T.reinterpret(f"int16x{lanes}", stored), f"int32x{lanes}") << ints(13, lanes)
        return T.reinterpret(f"float32x{lanes}", bits & ints(-0x70002000, lanes)) * floats(2.0**112, lanes)


class Relaxed16(Simd128):
    """i16x8.relaxed_dot_i8x16_i7x16_s adds two products of a signed byte and a weight of 7 bits in 16 bits: on x86
    vpmaddubsw."""

    _swizzle = "llvm.wasm.relaxed.swizzle"

    def operand(self, word: Value, largest: int | None) -> Value:
        return super().operand(word, largest) if largest is None else _bytes(let(spread(word, 4)))

    def sums(self, largest: int | None) -> Dots:
        return _WideDots() if largest is None else _PairDots(largest)


class Relaxed(Relaxed16):
    """i32x4.relaxed_dot_i8x16_i7x16_add_s adds 4 products in 32 bits: where the browser has vpdpbusd or sdot for it.
    Signed weights are multiplied in two planes."""

    def operand(self, word: Value, largest: int | None) -> Value:
        return _bytes(let(spread(word, 4)))

    def sums(self, largest: int | None) -> Dots:
        return _PlaneDots() if largest is None else _QuadDots()


class _WideDots:
    """Bytes are widened to 16 bits: sums of two products, for the rows' halves."""

    def __init__(self) -> None:
        self._halves = [ints(0, 4), ints(0, 4)]

    def add(self, weights: Value, x: Value) -> None:
        for which in (0, 1):
            wide = _wide(half(_bytes(weights), which, "int8x8"))
            self._halves[which] = let(self._halves[which] + pure("int32x4", "llvm.wasm.dot", wide, x))

    def pin(self) -> None:
        self._halves = [pinned(each) for each in self._halves]

    def total(self) -> Value:
        even, odd = (T.Shuffle(self._halves, [lane + which for lane in (0, 2, 4, 6)]) for which in (0, 1))
        return let(even + odd)


class _PairDots:
    """Sums of two products in 16 bits, which are widened before they could overflow."""

    def __init__(self, largest: int) -> None:
        self._fit = ((1 << 15) - 1) // (2 * largest * 127)
        self._pairs: list[Value] = []  # at most `_fit` products, and their sum once it is pinned
        self._count, self._wide = 0, list[Value]()

    def add(self, weights: Value, x: Value) -> None:
        if self._count == self._fit:
            self._widen()
        products = let(pure("int16x8", "llvm.wasm.relaxed.dot.i8x16.i7x16.signed", x, _bytes(weights)))
        self._pairs, self._count = [functools.reduce(_add, [*self._pairs, products])], self._count + 1

    def pin(self) -> None:
        if self._count == self._fit:
            self._widen()
        self._pairs, self._wide = ([pinned(each) for each in some] for some in (self._pairs, self._wide))

    def total(self) -> Value:
        self._widen()
        return functools.reduce(_add, self._wide)

    def _widen(self) -> None:
        sums = [pure("int32x4", "llvm.wasm.dot", each, spread(T.int16(1), 8)) for each in self._pairs]
        self._wide, self._pairs, self._count = [functools.reduce(_add, [*self._wide, *sums])], [], 0


class _QuadDots:
    """Sums of four products in 32 bits."""

    def __init__(self) -> None:
        self._sums = ints(0, 4)

    def add(self, weights: Value, x: Value) -> None:
        arguments = x, _bytes(weights), self._sums
        self._sums = let(pure("int32x4", "llvm.wasm.relaxed.dot.i8x16.i7x16.add.signed", *arguments))

    def pin(self) -> None:
        self._sums = pinned(self._sums)

    def total(self) -> Value:
        return self._sums


class _PlaneDots:
    """Signed bytes as 7 bits minus 128 times the sign."""

    def __init__(self) -> None:
        self._low, self._signs = _QuadDots(), _QuadDots()

    def add(self, weights: Value, x: Value) -> None:
        self._low.add(let(weights & ints(0x7F7F7F7F, 4)), x)
        self._signs.add(let((weights >> ints(7, 4)) & ints(0x01010101, 4)), x)

    def pin(self) -> None:
        self._low.pin()
        self._signs.pin()

    def total(self) -> Value:
        return let(self._low.total() - self._signs.total() * ints(128, 4))


def _wide(eight: Value) -> Value:
    return T.cast(eight, "int16x8")


ISAS: dict[str, Isa] = {
    "generic": Generic(), "avx2": Avx2(), "avxvnni": AvxVnni(), "avx512vnni": Avx512Vnni(),
    "avx512bf16": Avx512Bf16(),
    "neon": Neon(), "dotprod": DotProd(), "i8mm": I8mm(),
    "relaxed": Relaxed(), "relaxed16": Relaxed16(), "simd": Simd128(),
}  # fmt: skip
