"""What an instruction set is to kernels, and plain vector arithmetic, which LLVM compiles for every CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.vectors import Value, floats, ints, let, spread


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


@runtime_checkable
class PairIsa(Isa, Protocol):
    """An instruction set that multiplies pairs of BF16. A lane holds a pair; the type of its 32 bits is float32."""

    def pair(self, first: Value, second: Value) -> Value:
        """Each lane of both vectors as a pair."""
        ...

    def neighbours(self, values: Value) -> Value:
        """Neighbouring lanes as 8 pairs."""
        ...

    def dot_pairs(self, sums: Value, a: Value, b: Value) -> Value:
        """sums + the products of both halves of each lane, float32."""
        ...


@runtime_checkable
class ByteIsa(Isa, Protocol):
    """An instruction set that adds products of four unsigned and four signed bytes to each lane."""

    def products(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        """sums + the products of the four bytes of each lane."""
        ...

    def quadruples(self, lines: Value) -> Value:
        """4 lines of 16 bytes, transposed: a lane has the bytes of one place."""
        ...


QUADRUPLES = [4 * line + place for place in range(4) for line in range(4)]
"""The order of 16 bytes or words, four by four, transposed."""


PAIRS = ", ".join(f"i32 {lane}, i32 {lane + 16}" for lane in range(16))
"""LLVM's order of the lanes of two vectors, as pairs."""


class BFloat16Instructions:
    """The methods of `PairIsa`, by the functions edge_pair, edge_neighbours and edge_dot_pairs among `pins`."""

    def pair(self, first: Value, second: Value) -> Value:
        return let(T.call_extern("float32x16", "edge_pair", first, second))

    def neighbours(self, values: Value) -> Value:
        return let(T.call_extern("float32x8", "edge_neighbours", values))

    def dot_pairs(self, sums: Value, a: Value, b: Value) -> Value:
        return let(T.call_extern("float32x16", "edge_dot_pairs", sums, a, b))


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


class Float16Instructions(Generic):
    """CPUs with instructions that convert float16."""

    def from_f16(self, stored: Value) -> Value:
        return T.cast(T.reinterpret("float16x16", stored), "float32x16")

    def to_f16(self, values: Value) -> Value:
        return T.reinterpret("uint16x16", T.cast(values, "float16x16"))


def repeated(table: Sequence[int], lanes: int) -> Value:
    """16 signed bytes as 4 int32 lanes, repeated."""
    words = np.array(table, np.int8).view("<i4").tolist()
    return T.Shuffle([ints(word, 4) for word in words], [4 * (lane % 4) for lane in range(lanes)])


def add(a: Value, b: Value) -> Value:
    return let(a + b)
