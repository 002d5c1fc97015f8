"""Products of matrices and activations, as data, and the kernels of a step: one token, bound by reading the weights.

S threads (`Tuning.split`) share the columns of R rows (`Tuning.rows`). Each row's S sums are added in shared memory by
the thread that then writes the result, so a kernel has one barrier. An RMSNorm before the product costs none: the sums
of squares are added up along the way, since its scale is a factor of the whole result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce as fold
from itertools import accumulate

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.kernels.functions import ACTIVATIONS, soft_cap
from edge.backends.tvm.gpu.kernels.norms import Norm, Statistics, apply, inverse_root, row_statistics
from edge.backends.tvm.gpu.kernels.quants import Words, dot_part
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    as_float,
    barrier,
    build,
    f32,
    i32,
    lane,
    let,
    loop,
    quotient,
    remainder,
    store,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Matrix, Piece, Vector, Weights
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.layout import Shape


@dataclass(frozen=True)
class Factor:
    """A matrix of a product, and where its results go. at: of its first row in a row of results."""

    matrix: Matrix
    bias: Vector | None = None
    at: int = 0


@dataclass(frozen=True)
class Epilogue:
    """What becomes of results, in rows of `stride` values.

    kind: store; add to what is there; activate: activation(first factor) · second factor, or activation(only one).
    scale: of the results, bias included, before `cap`.
    """

    kind: str
    stride: int
    scale: float = 1.0
    cap: float = 0.0
    activation: str = ""


@dataclass(frozen=True)
class Product:
    """factors: of the same columns. norm: of the inputs, in the same buffer as the matrices, or in `rest`, for the
    head's. after: a norm of the results, which `norms.add_normed` adds to the hidden states; the product only stores.
    """

    name: str
    factors: tuple[Factor, ...]
    epilogue: Epilogue
    norm: Norm | None = None
    norm_in_rest: bool = False
    after: Norm | None = None

    @property
    def columns(self) -> int:
        return self.factors[0].matrix.columns

    @property
    def paired(self) -> bool:
        """Two matrices make one result."""
        return self.epilogue.kind == "activate" and len(self.factors) == 2

    @property
    def bundles(self) -> list[tuple[Factor, ...]]:
        """Factors whose rows are multiplied by the same threads."""
        return [self.factors] if self.paired else [(factor,) for factor in self.factors]


def layer_products(layout: LayerLayout, shape: Shape, number: int = 0) -> dict[str, Product]:
    """The products of a layer by their phases. Their inputs: x, mixed, x, ffn; their outputs: qkv, x, ffn, x.

    A product with a norm behind it has another output, which is added to x. number: tells kernels of different layouts
    apart.
    """
    return {
        "qkv": _qkv(layout, shape, f"edge_qkv_{number}"),
        "output": _into_hidden(layout, shape, f"edge_output_{number}", "attn_output", "post_attention_norm"),
        "gate-up": _gate_up(layout, shape, f"edge_gate_up_{number}"),
        "down": _into_hidden(layout, shape, f"edge_down_{number}", "ffn_down", "post_ffw_norm"),
    }


def head_products(weights: Weights, shape: Shape) -> list[tuple[Piece, Product]]:
    """Of x or its normalised rows, to rows of logits."""
    epilogue = Epilogue("store", shape.vocab, shape.logit_scale, shape.logit_cap)
    norm = Norm.of(weights.rest, "output_norm", shape)
    found = []
    for number, piece in enumerate(weights.head):
        factors = (Factor(piece.matrix, at=piece.first_row),)
        found.append((piece, Product(f"edge_head_{number}", factors, epilogue, norm, norm_in_rest=True)))
    return found


def _qkv(layout: LayerLayout, shape: Shape, name: str) -> Product:
    matrices = ("attn_q", "attn_k", "attn_v")
    ends = list(accumulate((layout.matrix(each).rows for each in matrices), initial=0))
    factors = tuple(_factor(layout, each, at) for each, at in zip(matrices, ends, strict=False))
    return Product(name, factors, Epilogue("store", ends[-1]), Norm.of(layout, "attn_norm", shape))


def _gate_up(layout: LayerLayout, shape: Shape, name: str) -> Product:
    factors = tuple(_factor(layout, each) for each in shape.groups["gate_up"])
    epilogue = Epilogue("activate", shape.padded_ffn, activation=shape.activation)
    return Product(name, factors, epilogue, Norm.of(layout, "ffn_norm", shape))


def _into_hidden(layout: LayerLayout, shape: Shape, name: str, matrix: str, after: str) -> Product:
    norm = Norm.of(layout, after, shape)
    epilogue = Epilogue("store" if norm else "add", shape.padded_hidden, 1.0 if norm else shape.residual_scale)
    return Product(name, (_factor(layout, matrix),), epilogue, after=norm)


def _factor(layout: LayerLayout, name: str, at: int = 0) -> Factor:
    return Factor(layout.matrix(name), layout.vector(f"{name}.bias"), at)


def finish(
    scope: Scope, product: Product, bundle: Sequence[Factor], row: Value, token: Value, sums: Sequence[Value]
) -> None:
    """Write the result of a row, of the sums that each factor of the bundle has there."""
    epilogue = product.epilogue
    values = [
        let(total + as_float(scope.w1[row + factor.bias.at]) if factor.bias else total)
        for total, factor in zip(sums, bundle, strict=True)
    ]
    at = let(token * epilogue.stride + row + bundle[0].at)
    value = values[0]
    if epilogue.kind == "activate":
        value = ACTIVATIONS[epilogue.activation](value)
        value = value * values[1] if product.paired else value
    if epilogue.scale != 1:
        value = value * f32(epilogue.scale)
    if epilogue.cap:
        value = soft_cap(let(value), epilogue.cap)
    store(scope.out, at, scope.out[at] + value if epilogue.kind == "add" else value)


@contextmanager
def only_bundle(group: Value, first: int, count: int, bundles: int) -> Iterator[Value]:
    """The workgroups first … first + count − 1, by their number among these."""
    if bundles == 1:
        yield group
        return
    with when(T.And(group >= i32(first), group < i32(first + count))):
        yield let(group - i32(first))


def step(product: Product, tuning: Tuning, *, last: bool = False) -> Built:
    """The kernel for one token: row 0 of `x`, or the last row of a pass, if its logits are wanted (`last`).

    Buffers: out float32; x float32x4 [rows, columns]; w4, w1 the weights; rest, for the head's norm; tables for `last`.
    """
    split = min(tuning.split, _power_of_two(product.columns // PART), tuning.workgroup)
    at_once = tuning.workgroup // split * tuning.rows  # rows of a workgroup
    counts = [-(-bundle[0].matrix.rows // at_once) for bundle in product.bundles]
    starts = list(accumulate(counts, initial=0))

    def body(scope: Scope) -> None:
        memory = scope.shared(((1 + product.paired) * tuning.rows + 1) * scope.threads)
        first: Value = i32(0)
        with when(scope.tables[State.WANTED] > 0) if last else _always():
            if last:
                first = let((to_int(scope.tables[State.COUNT]) - 1) * (product.columns // 4))
            inputs = _Inputs.of(scope, product, first, memory)
            for bundle, start, count in zip(product.bundles, starts, counts, strict=False):
                with only_bundle(scope.group, start, count, len(product.bundles)) as group:
                    _multiply(scope, product, bundle, group, inputs, memory, split, tuning.rows)

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32"}
    reads |= {"rest": "uint32x4"} if product.norm and product.norm_in_rest else {}
    reads |= {"tables": "uint32"} if last else {}
    return build(product.name, tuning.workgroup, reads, {"out": "float32"}, (), body, (starts[-1], 1))


@contextmanager
def _always() -> Iterator[None]:
    yield


def _power_of_two(count: int) -> int:
    """The smallest that is not below."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class _Inputs:
    """How a kernel reads its activations. first: of their row in `x`, in units of 4. statistics: of a LayerNorm."""

    scope: Scope
    norm: Norm | None
    first: Value
    norms: Buffer
    statistics: Statistics | None

    @classmethod
    def of(cls, scope: Scope, product: Product, first: Value, memory: Buffer) -> _Inputs:
        norm, statistics = product.norm, None
        if norm and norm.kind == "layer":

            def read(at: Value) -> list[Value]:
                quad = let(scope.x[first + at])
                return [lane(quad, index) for index in range(4)]

            statistics = row_statistics(scope, memory, norm, read, at_once=4)
        return cls(scope, norm, first, scope.rest if product.norm_in_rest else scope.w4, statistics)

    @property
    def is_scaled_late(self) -> bool:
        return self.norm is not None and self.norm.kind == "rms"

    def read(self, part: Value) -> tuple[list[Value], Value]:
        """The 32 activations of a part, and the sum of their squares before norm and weights."""
        x = self._lanes(self.scope.x, self.first + part * (PART // 4))
        squares = _sum([value * value for value in x]) if self.is_scaled_late else f32(0.0)
        if not self.norm:
            return x, squares
        weights = self._vector(self.norm.weight, part)
        if self.statistics is None:
            return [let(value * weight) for value, weight in zip(x, weights, strict=True)], squares
        biases = self._vector(self.norm.bias, part) if self.norm.bias else [None] * PART
        normed = (apply(value, self.statistics, *each) for value, *each in zip(x, weights, biases, strict=True))
        return [let(value) for value in normed], squares

    def _vector(self, vector: Vector, part: Value) -> list[Value]:
        return [as_float(word) for word in self._lanes(self.norms, part * (PART // 4) + vector.at // 4)]

    @staticmethod
    def _lanes(buffer: Buffer, at: Value) -> list[Value]:
        at = let(at)
        quads = [let(buffer[at + index]) for index in range(PART // 4)]
        return [lane(quad, index) for quad in quads for index in range(4)]


def _sum(values: Sequence[Value]) -> Value:
    return let(fold(lambda one, other: one + other, values))


def _multiply(
    scope: Scope, product: Product, bundle: Sequence[Factor], group: Value, inputs: _Inputs, memory: Buffer,
    split: int, rows: int,
) -> None:  # fmt: skip
    """The rows of a workgroup."""
    words, matrix = Words(scope.w4, scope.w1), bundle[0].matrix
    team, place = let(quotient(scope.thread, split)), let(remainder(scope.thread, split))
    teams = scope.threads // split
    first = let((group * teams + team) * rows)
    own = [let(T.min(first + index, i32(matrix.rows - 1))) for index in range(rows)]
    sums = [[Register(f32(0.0)) for _ in bundle] for _ in own]
    squares = Register(f32(0.0))
    with loop(0, -(-matrix.parts // split)) as turn:
        part = let(turn * split + place)
        with when(part < matrix.parts) if matrix.parts % split else _always():
            x, part_squares = inputs.read(part)
            if inputs.is_scaled_late:
                squares.value = squares.value + part_squares
            x_sums = [_sum(x[:16]), _sum(x[16:])]
            for row, registers in zip(own, sums, strict=True):
                for factor, each in zip(bundle, registers, strict=True):
                    each.value = each.value + dot_part(words, factor.matrix, row, part, x, x_sums)

    slots = len(bundle) * rows + inputs.is_scaled_late
    for index, registers in enumerate(sums):
        for number, each in enumerate(registers):
            store(memory, scope.thread + (number * rows + index) * scope.threads, each.value)
    if inputs.is_scaled_late:
        store(memory, scope.thread + (slots - 1) * scope.threads, squares.value)
    barrier()
    with strided(scope, teams * rows) as local:
        row = let(group * (teams * rows) + local)
        with when(row < matrix.rows):
            from_team, index = let(quotient(local, rows) * split), let(remainder(local, rows) * scope.threads)
            totals = [
                _added(lambda at, start=number * rows * scope.threads: memory[from_team + index + start + at], split)  # type: ignore[misc]
                for number in range(len(bundle))
            ]
            if inputs.is_scaled_late and product.norm:
                last = (slots - 1) * scope.threads
                scale = inverse_root(_added(lambda at: memory[from_team + last + at], split), product.norm)
                totals = [total * scale for total in totals]
            finish(scope, product, bundle, row, i32(0), totals)


def _added(read: Callable[[int], Value], count: int) -> Value:
    return _sum([read(at) for at in range(count)])
