"""What differs between instruction sets: the dot product of bytes, and float16. A new one is a class here."""

from __future__ import annotations

from typing import Protocol

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.kernels.lanes import Value, floats, half, ints, let, pure, spread


class Isa(Protocol):
    """16 int32 lanes hold 4 bytes each; `x` is one int32 of 4 signed bytes, the same for all lanes."""

    signed_offset: int  # what `dot_signed` adds to every weight; the caller subtracts its product with the sum of x

    def dot(self, sums: Value, weights: Value, x: Value) -> Value:
        """sums + Σ weights · x over the 4 bytes of each lane; weights are unsigned and below 128."""
        ...

    def dot_signed(self, sums: Value, weights: Value, x: Value) -> Value:
        """The same for signed weights, plus signed_offset · Σ x."""
        ...

    def from_f16(self, stored: Value) -> Value:
        """16 lanes of uint16 that hold float16, as float32."""
        ...

    def to_f16(self, values: Value) -> Value:
        """16 float32 lanes rounded to float16, as uint16."""
        ...


class Generic:
    """Plain vector arithmetic, which LLVM has on every CPU."""

    signed_offset = 0

    def dot(self, sums: Value, weights: Value, x: Value) -> Value:
        return self._dot(sums, weights, x, lambda byte: (weights >> ints(8 * byte)) & ints(0xFF))

    def dot_signed(self, sums: Value, weights: Value, x: Value) -> Value:
        return self._dot(sums, weights, x, lambda byte: (weights << ints(24 - 8 * byte)) >> ints(24))

    def _dot(self, sums: Value, weights: Value, x: Value, byte_of: object) -> Value:
        for byte in range(4):
            scalar = (x << T.int32(24 - 8 * byte)) >> T.int32(24)
            sums = let(sums + byte_of(byte) * spread(scalar))  # type: ignore[operator]
        return sums

    def from_f16(self, stored: Value) -> Value:
        """Its exponent and fraction, read as a float32, are too small by 2^112; infinities are put right."""
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
    """CPUs that convert float16 themselves."""

    def from_f16(self, stored: Value) -> Value:
        return T.cast(T.reinterpret("float16x16", stored), "float32x16")

    def to_f16(self, values: Value) -> Value:
        return T.reinterpret("uint16x16", T.cast(values, "float16x16"))


class Avx2(_Float16Instructions):
    """vpmaddubsw adds two products of an unsigned and a signed byte in 16 bits: weights below 129 cannot overflow."""

    def dot(self, sums: Value, weights: Value, x: Value) -> Value:
        parts = [self._pairs(half(weights, which, "int32x8"), spread(x, 8)) for which in (0, 1)]
        return let(sums + T.vectorcombine("int32x16", *parts))

    def dot_signed(self, sums: Value, weights: Value, x: Value) -> Value:
        parts = []
        for which in (0, 1):
            w = T.reinterpret("int8x32", half(weights, which, "int32x8"))
            signs = pure("int8x32", "llvm.x86.avx2.psign.b", T.reinterpret("int8x32", spread(x, 8)), w)
            size = pure("int8x32", "llvm.x86.avx2.psign.b", w, w)  # |w|; 128 as an unsigned byte for -128
            parts.append(self._pairs(size, signs))
        return let(sums + T.vectorcombine("int32x16", *parts))

    def _pairs(self, weights: Value, x: Value) -> Value:
        arguments = (T.reinterpret("int8x32", weights), T.reinterpret("int8x32", x))
        pairs = pure("int16x16", "llvm.x86.avx2.pmadd.ub.sw", *arguments)
        return pure("int32x8", "llvm.x86.avx2.pmadd.wd", pairs, spread(T.int16(1), 16))


class Avx512Vnni(_Float16Instructions):
    """vpdpbusd: 16 sums of 4 products of an unsigned and a signed byte."""

    signed_offset = 128

    def dot(self, sums: Value, weights: Value, x: Value) -> Value:
        arguments = (T.reinterpret("int8x64", weights), T.reinterpret("int8x64", spread(x)))
        return let(pure("int32x16", "llvm.x86.avx512.vpdpbusd.512", sums, *arguments))

    def dot_signed(self, sums: Value, weights: Value, x: Value) -> Value:
        return self.dot(sums, weights ^ ints(-0x7F7F7F80), x)  # 0x80808080: signed to unsigned + 128


ISAS: dict[str, Isa] = {"generic": Generic(), "avx2": Avx2(), "avx512vnni": Avx512Vnni()}
