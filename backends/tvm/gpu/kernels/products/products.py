"""Products of matrices and activations, as data, and the rows that a workgroup multiplies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.adapters import LowRank
from edge.backends.tvm.gpu.kernels.functions import ACTIVATIONS, soft_cap
from edge.backends.tvm.gpu.kernels.norms import Norm
from edge.backends.tvm.gpu.kernels.products.quants import Words, floats_of
from edge.backends.tvm.gpu.kernels.threads import (
    Register,
    Scope,
    Value,
    f32,
    hold,
    i32,
    let,
    loop,
    prefetch,
    quotient,
    select,
    spread,
    store,
    strided,
    total,
    when,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Matrix, Piece, Vector, WeightsLayout
from edge.backends.tvm.packing.shape import Shape

_LINE = 32  # words that are read at once

# The sums of a row of a band, one for each factor, and of the squares, if results are scaled late.
Found = Callable[[Value], tuple[list[Value], Value | None]]


@dataclass(frozen=True)
class Factor:
    """A matrix of a product. at: its first column in the results. low: its LoRA adapter, whose B multiplies the
    matrix's A · x in `low`. bounds: the least and the greatest result, where a file has them."""

    matrix: Matrix
    bias: Vector | None = None
    at: int = 0
    low: LowRank | None = None
    bounds: tuple[Vector, Vector] | None = None

    @classmethod
    def of(cls, layout: LayerLayout, name: str, at: int = 0) -> Factor:
        return cls(layout.matrix(name), layout.vector(f"{name}.bias"), at, bounds=layout.bounds(name, "output"))


@dataclass(frozen=True)
class Epilogue:
    """The final step on results, in rows of `stride` values."""

    kind: str  # store; add to existing values; activate: activation(first factor) · second factor, or of the only one
    stride: int
    scale: float = 1.0  # of the results, bias included, before `cap`
    cap: float = 0.0
    activation: str = ""
    inputs: int = 0  # if not 0: also multiplied by rows of the buffer `inputs`, which have this many values
    share: tuple[int, int] | None = None  # (stride, place): also multiplied by this value of the token in `shares`


@dataclass(frozen=True)
class Residual:
    """A pending residual that a step's product first adds to its inputs: scale · norm(result of the previous
    product)."""

    norm: Norm
    scale: float


@dataclass(frozen=True)
class PerHead:
    """The matrix of a product holds those of several heads, one after the other, each of which multiplies values of its
    own. rows: of a head's matrix, a multiple of 16. inputs, outputs: values from one head's to the next one's."""

    rows: int
    inputs: int
    outputs: int


@dataclass(frozen=True)
class Product:
    """A product of matrices and activations."""

    name: str
    factors: tuple[Factor, ...]  # have the same columns
    epilogue: Epilogue
    norm: Norm | None = None  # of the inputs, in the matrices' buffer, or in `rest`
    norm_in_rest: bool = False
    after: Norm | None = None  # norm of the results, added by add_normed or as the next product's `residual`
    residual: Residual | None = None
    per_head: PerHead | None = None

    @property
    def inputs(self) -> int:
        """Values of a token's activations."""
        matrix = self.factors[0].matrix
        return matrix.rows // self.per_head.rows * self.per_head.inputs if self.per_head else matrix.columns

    def input_of(self, row: Value) -> Value:
        """Where the activations of a row begin, in units of 4."""
        return quotient(row, self.per_head.rows) * (self.per_head.inputs // 4) if self.per_head else i32(0)

    @property
    def columns(self) -> int:
        return self.factors[0].matrix.columns

    @property
    def paired(self) -> bool:
        """Whether two matrices make one result."""
        return self.epilogue.kind == "activate" and len(self.factors) == 2

    @property
    def reads(self) -> dict[str, str]:
        """Buffers that the end of a product reads, with their dtypes."""
        found = {"inputs": self.epilogue.inputs, "shares": self.epilogue.share}
        low = {"low": "float32x4", "lora4": "uint32x4"} if self.adapted else {}
        return {name: "float32" for name, is_read in found.items() if is_read} | low

    @property
    def adapted(self) -> bool:
        return any(factor.low for factor in self.factors)

    @property
    def bundles(self) -> list[tuple[Factor, ...]]:
        """Groups of factors whose rows are multiplied by the same threads."""
        return [self.factors] if self.paired else [(factor,) for factor in self.factors]


def head_products(weights: WeightsLayout, shape: Shape) -> list[tuple[Piece, Product]]:
    """The head's products, from x or its normalized rows to rows of logits."""
    epilogue = Epilogue("store", shape.vocab, shape.logit_scale, shape.logit_cap)
    norm = Norm.of(weights.rest, "output_norm", shape)
    found = []
    for number, piece in enumerate(weights.head):
        factors = (Factor(piece.matrix, at=piece.first_row),)
        found.append((piece, Product(f"edge_head_{number}", factors, epilogue, norm, norm_in_rest=True)))
    return found


@dataclass(frozen=True)
class Band:
    """Rows that a workgroup multiplies at once, and the bundle that has them. Barriers stand outside of `each`, and of
    all conditions, since pocl 3.1 computes wrong sums otherwise."""

    scope: Scope
    product: Product
    number: Value  # among all bands of the product; a band after the last one has no rows of a matrix
    starts: tuple[int, ...]  # each bundle's first band, and the end
    first: Value  # its first row in the matrix
    rows: Value  # of the matrix
    at: Value  # first column of its results

    @classmethod
    def of(cls, scope: Scope, product: Product, height: int, number: Value | None = None) -> Band:
        """A band of `height` rows. number: by default, the workgroup's."""
        number = scope.group if number is None else number
        starts, heads = _starts(product, height), [bundle[0] for bundle in product.bundles]
        first = hold((number - _chosen(number, starts, starts[:-1])) * height, "int32")
        rows = hold(_chosen(number, starts, [head.matrix.rows for head in heads]), "int32")
        at = hold(_chosen(number, starts, [head.at for head in heads]), "int32")
        return cls(scope, product, number, starts, first, rows, at)

    def each(self) -> Iterator[Sequence[Factor]]:
        """Iterate over bundles, each within a condition that the band belongs to it."""
        for number, bundle in enumerate(self.product.bundles):
            with self._only(number):
                yield bundle

    @contextmanager
    def _only(self, number: int) -> Iterator[None]:
        if len(self.product.bundles) == 1:
            yield
            return
        start, stop = self.starts[number], self.starts[number + 1]
        with when(T.And(self.number >= start, self.number < stop)):
            yield

    def prefetch(self, height: int) -> None:
        """Begin to read this workgroup's weights, before `begin`."""
        for bundle in self.each():
            for factor in bundle:
                matrix = factor.matrix
                for at, words in zip(matrix.offsets, matrix.row_words, strict=False):
                    start, last = let(self.first * words + at), i32(at + matrix.rows * words - 1)
                    if words:
                        with strided(self.scope, -(-height * words // _LINE) + 1) as line:
                            prefetch(self.scope.w1, T.min(start + line * _LINE, last))

    def finish(self, row: Value, token: Value, sums: Sequence[Value]) -> None:
        """Write the result of a matrix row from the sums of the bundle's factors."""
        epilogue, words = self.product.epilogue, Words(self.scope.w4, self.scope.w1)
        values = [Register(each) for each in sums]
        if any(factor.bias for factor in self.product.factors):
            for bundle in self.each():
                for value, factor in zip(values, bundle, strict=True):
                    if factor.bias:
                        value.value = value.value + words.value(factor.bias, row)
        if any(factor.bounds for factor in self.product.factors):
            for bundle in self.each():
                for value, factor in zip(values, bundle, strict=True):
                    if factor.bounds:
                        low, high = (words.value(bound, i32(0)) for bound in factor.bounds)
                        value.value = T.max(T.min(value.value, high), low)
        if self.product.adapted:
            self._adapt(values, row, token)
        at = let(token * epilogue.stride + row + self.at)
        if heads := self.product.per_head:
            at = let(at + quotient(row, heads.rows) * (heads.outputs - heads.rows))
        value = values[0].value
        if epilogue.kind == "activate":
            value = ACTIVATIONS[epilogue.activation](value)
            value = value * values[1].value if self.product.paired else value
        if epilogue.scale != 1:
            value = value * f32(epilogue.scale)
        if epilogue.inputs:
            value = value * self.scope.inputs[token * epilogue.inputs + row]
        if epilogue.share:
            stride, place = epilogue.share
            value = value * self.scope.shares[token * stride + place]
        if epilogue.cap:
            value = soft_cap(value, epilogue.cap)
        store(self.scope.out, at, self.scope.out[at] + value if epilogue.kind == "add" else value)

    def _adapt(self, values: Sequence[Register], row: Value, token: Value) -> None:
        """Add B's row · (A x) of LoRA: once for all bundles, if their adapters are alike, since this is the longest
        part of each result's code."""
        heads = [bundle[0] for bundle in self.product.bundles]
        if len({(head.low.row_words, head.low.a.kind) if head.low else None for head in heads}) == 1 < len(heads):
            numbers = _chosen(self.number, self.starts, range(len(heads)))
            places = _chosen(self.number, self.starts, [head.low.at // 4 for head in heads if head.low])
            assert heads[0].low
            self._add_low_rank(values[0], heads[0].low, numbers, places, row, token)
            return
        for bundle in self.each():
            for value, factor in zip(values, bundle, strict=True):
                if low := factor.low:
                    number = i32(self.product.factors.index(factor))
                    self._add_low_rank(value, low, number, i32(low.at // 4), row, token)

    def _add_low_rank(
        self, value: Register, low: LowRank, number: Value, at: Value, row: Value, token: Value
    ) -> None:  # fmt: skip
        """value += row of B · (A x). The buffer `low` has A x for all matrices of the product, this one's as `number`;
        B begins `at` units of 4 words."""
        quads = low.row_words // 4
        x_at = let((token * len(self.product.factors) + number) * (low.rank // 4))
        b_at, found = let(row * quads + at), Register(spread(f32(0.0)), "float32x4")
        with loop(0, quads) as quad:
            weights = floats_of(let(self.scope.lora4[b_at + quad]), low.a.kind)
            for index, each in enumerate(weights):
                found.value = found.value + each * self.scope.low[x_at + quad * len(weights) + index]
        value.value = value.value + total(found.value)


def _chosen(number: Value, starts: Sequence[int], values: Sequence[int]) -> Value:
    """The value of the bundle to which a band belongs."""
    found: Value = i32(values[-1])
    for start, value in zip(starts[-2:0:-1], values[-2::-1], strict=True):
        found = select(number < start, i32(value), found)
    return found


def workgroups(product: Product, height: int) -> int:
    """The number of workgroups with `height` rows each."""
    return _starts(product, height)[-1]


def _starts(product: Product, height: int) -> tuple[int, ...]:
    return tuple(accumulate((-(-bundle[0].matrix.rows // height) for bundle in product.bundles), initial=0))
