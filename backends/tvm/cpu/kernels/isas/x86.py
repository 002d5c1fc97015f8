"""x86-64: AVX2, AVX-VNNI and AVX-512."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.isas.generic import (
    PAIRS,
    QUADRUPLES,
    BFloat16Instructions,
    Float16Instructions,
    add,
    repeated,
)
from edge.backends.tvm.cpu.kernels.vectors import Value, half, ints, lanes_of, let, pinned, pins, pure, spread


class Avx2(Float16Instructions):
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
        pairs = [functools.reduce(add, pairs[at : at + fit]) for at in range(0, len(pairs), fit)]
        return functools.reduce(add, map(self._widened, pairs))

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        bytes_of = T.reinterpret("int8x32", repeated(table, 8))
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


class Avx512Vnni(Float16Instructions):
    """vpdpbusd: 16 sums of 4 products of an unsigned and a signed byte."""

    signed_offset = 128

    def dot(self, sums: Value, weights: Sequence[Value], x: Sequence[Value], largest: int | None) -> Value:
        for register, word in zip(weights, x, strict=True):
            sums = self.products(sums, _unsigned(register, largest), spread(word))
        return sums

    def products(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        bytes_of = (T.reinterpret("int8x64", each) for each in (unsigned, signed))
        return let(pure("int32x16", "llvm.x86.avx512.vpdpbusd.512", sums, *bytes_of))

    def quadruples(self, lines: Value) -> Value:
        words, order = T.Shuffle([let(T.reinterpret("int32x16", lines))], QUADRUPLES), repeated(QUADRUPLES, 16)
        bytes_of = (T.reinterpret("int8x64", let(each)) for each in (words, order))
        return let(T.reinterpret("int32x16", pure("int8x64", "llvm.x86.avx512.pshuf.b.512", *bytes_of)))

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        arguments = (T.reinterpret("int8x64", repeated(table, 16)), T.reinterpret("int8x64", indices))
        return T.reinterpret("int32x16", pure("int8x64", "llvm.x86.avx512.pshuf.b.512", *arguments))


class Avx512Bf16(BFloat16Instructions, Avx512Vnni):
    """vdpbf16ps: 16 sums of 2 products of BF16."""

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
""".replace("PAIRS", PAIRS)


class AvxVnni(Avx2):
    """AVX2 with vpdpbusd, on registers of 256 bits."""

    signed_offset = 128

    def _half(self, weights: Sequence[Value], x: Sequence[Value], largest: int | None) -> Value:
        sums = ints(0, 8)
        for register, word in zip(weights, x, strict=True):
            sums = self._products(sums, _unsigned(register, largest), spread(word, 8))
        return sums

    def products(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        halves = ([half(each, which, "int32x8") for each in (sums, unsigned, signed)] for which in (0, 1))
        return let(T.vectorcombine("int32x16", *(self._products(*three) for three in halves)))

    def quadruples(self, lines: Value) -> Value:
        words, order = let(T.Shuffle([let(T.reinterpret("int32x16", lines))], QUADRUPLES)), repeated(QUADRUPLES, 8)
        halves = (
            [T.reinterpret("int8x32", each) for each in (half(words, which, "int32x8"), order)] for which in (0, 1)
        )
        turned = (pure("int8x32", "llvm.x86.avx2.pshuf.b", *two) for two in halves)
        return let(T.vectorcombine("int32x16", *(T.reinterpret("int32x8", each) for each in turned)))

    def _products(self, sums: Value, unsigned: Value, signed: Value) -> Value:
        """For 8 of the 16 lanes."""
        bytes_of = (T.reinterpret("int8x32", each) for each in (unsigned, signed))
        return let(pure("int32x8", "llvm.x86.avx512.vpdpbusd.256", sums, *bytes_of))


def _unsigned(weights: Value, largest: int | None) -> Value:
    """Bytes for vpdpbusd, which takes unsigned ones: 128 is added to signed bytes."""
    return weights if largest is not None else let(weights ^ ints(-0x7F7F7F80, lanes_of(weights)))  # 0x80808080
