"""ARM64: Neon, its dot products of bytes, and products of 2 × 8 bytes."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.isas.generic import PAIRS, BFloat16Instructions, Float16Instructions, add, repeated
from edge.backends.tvm.cpu.kernels.isas.registers import bytes_of, joined, quarters_of
from edge.backends.tvm.cpu.kernels.vectors import Value, half, let, pure, spread

_PAIRS = """
declare <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float>, <8 x bfloat>, <8 x bfloat>)

define <16 x float> @edge_pair(<16 x float> %first, <16 x float> %second) alwaysinline {
  %one = fptrunc <16 x float> %first to <16 x bfloat>
  %other = fptrunc <16 x float> %second to <16 x bfloat>
  %pairs = shufflevector <16 x bfloat> %one, <16 x bfloat> %other, <32 x i32> <PAIRS>
  %lanes = bitcast <32 x bfloat> %pairs to <16 x float>
  ret <16 x float> %lanes
}

define <8 x float> @edge_neighbours(<16 x float> %values) alwaysinline {
  %short = fptrunc <16 x float> %values to <16 x bfloat>
  %lanes = bitcast <16 x bfloat> %short to <8 x float>
  ret <8 x float> %lanes
}

define <4 x float> @edge_dot_pairs(<4 x float> %sums, <4 x float> %a, <4 x float> %b) alwaysinline {
  %x = bitcast <4 x float> %a to <8 x bfloat>
  %y = bitcast <4 x float> %b to <8 x bfloat>
  %more = call <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float> %sums, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %more
}
""".replace("PAIRS", PAIRS)


class Neon(Float16Instructions):
    """ARM64: 32 registers of 128 bits, which a block's weights would fill. So each serves every token in turn."""

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        """smull: products are added in 16 bits as long as they fit: two of signed bytes, all of a block of nibbles."""
        sums = [quarters_of(start) for start in starts]
        room = ((1 << 15) - 1) // (127 * (128 if largest is None else largest))
        for first in range(0, len(weights), room):
            group = [quarters_of(register) for register in weights[first : first + room]]
            for token, words in zip(sums, x, strict=True):
                scalars = [T.reinterpret("int8x8", spread(word, 2)) for word in words[first : first + room]]
                for quarter in range(4):
                    parts = [
                        self._products([half(bytes_of(each[quarter]), which, "int8x8") for each in group], scalars)
                        for which in (0, 1)
                    ]
                    token[quarter] = let(token[quarter] + pure("int32x4", "llvm.aarch64.neon.addp", *parts))
        return map(joined, sums)

    def lookup(self, table: Sequence[int], indices: Value) -> Value:
        entries = bytes_of(repeated(table, 4))
        found = [pure("int8x16", "llvm.aarch64.neon.tbl1", entries, bytes_of(each)) for each in quarters_of(indices)]
        return joined([T.reinterpret("int32x4", each) for each in found])

    def _products(self, weights: Sequence[Value], x: Sequence[Value]) -> Value:
        """Sums of 2 neighbouring products each, over all weights: int32x4 from pairs of int8x8."""
        each = (pure("int16x8", "llvm.aarch64.neon.smull", *pair) for pair in zip(weights, x, strict=True))
        return pure("int32x4", "llvm.aarch64.neon.saddlp", functools.reduce(add, each))


class DotProd(Neon):
    """sdot: 4 sums of 4 products of signed bytes."""

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        sums = [quarters_of(start) for start in starts]
        for index, register in enumerate(weights):
            quarters = [bytes_of(each) for each in quarters_of(register)]
            for token, words in zip(sums, x, strict=True):
                scalar = bytes_of(let(spread(words[index], 4)))
                for number, quarter in enumerate(quarters):
                    token[number] = let(pure("int32x4", "llvm.aarch64.neon.sdot", token[number], quarter, scalar))
        return map(joined, sums)


class I8mm(BFloat16Instructions, DotProd):
    """smmla: [2, 8] · [2, 8]ᵀ of signed bytes, here two tokens · two rows. A single token uses sdot. bfdot: 4 sums of 2
    products of BF16; CPUs with one of the two extensions have both (Armv8.6-A)."""

    pins = _PAIRS

    def dot_pairs(self, sums: Value, a: Value, b: Value) -> Value:
        quarters = zip(*(quarters_of(T.reinterpret("int32x16", each)) for each in (sums, a, b)), strict=True)
        floats = ([T.reinterpret("float32x4", each) for each in three] for three in quarters)
        dots = [let(T.call_extern("float32x4", "edge_dot_pairs", *three)) for three in floats]
        return let(T.reinterpret("float32x16", joined([T.reinterpret("int32x4", each) for each in dots])))

    def dots(
        self, starts: Sequence[Value], weights: Sequence[Value], x: Sequence[Sequence[Value]], largest: int | None
    ) -> Iterator[Value]:
        """Pairs of registers are interleaved so that 8 bytes hold 8 values of one row; they meet pairs of words."""
        if len(starts) % 2:
            return super().dots(starts, weights, x, largest)
        pairs = range(0, len(starts), 2)
        sums = [_crossed(starts[pair], starts[pair + 1], _TOKENS) for pair in pairs]
        for index in range(0, len(weights), 2):
            rows = [bytes_of(each) for each in _crossed(weights[index], weights[index + 1], _ROWS)]
            for pair, products in zip(pairs, sums, strict=True):
                four = [words[at] for words in x[pair : pair + 2] for at in (index, index + 1)]
                tokens = bytes_of(let(T.Shuffle(four, list(range(4)))))
                for number, row in enumerate(rows):
                    products[number] = let(pure("int32x4", "llvm.aarch64.neon.smmla", products[number], tokens, row))
        return (joined(each) for products in sums for each in _uncrossed(products))


# How the lanes of two registers (0 … 3, 4 … 7) are combined into two others.
_ROWS = (0, 4, 1, 5), (2, 6, 3, 7)  # 8 bytes of a row, 4 from each
_TOKENS = (0, 1, 4, 5), (2, 3, 6, 7)  # two rows' sums of one token, and of the other; its own inverse


def _crossed(first: Value, second: Value, orders: tuple[tuple[int, ...], ...]) -> list[Value]:
    """Two vectors of 16 int32 lanes as 8 of 4, with lanes of both in each."""
    pairs = zip(quarters_of(first), quarters_of(second), strict=True)
    return [let(T.Shuffle(pair, order)) for pair in pairs for order in orders]


def _uncrossed(products: Sequence[Value]) -> list[list[Value]]:
    """The quarters of two tokens' sums."""
    pairs = [products[at : at + 2] for at in range(0, 8, 2)]
    return [[let(T.Shuffle(pair, order)) for pair in pairs] for order in _TOKENS]
