"""Products of matrices and activations, as data, and the kernels of a step: one token, bound by reading the weights.

S threads (`Tuning.split`) share the columns of R rows (`Tuning.rows`). Each row's S sums are added in shared memory by
the thread that then writes the result, so a kernel has one barrier. An RMSNorm before the product is free: the sums of
squares are accumulated along the way, since its scale is a factor of the whole result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce as fold
from itertools import accumulate

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.adapters import LowRank
from edge.backends.tvm.gpu.design import State, Tuning
from edge.backends.tvm.gpu.kernels.functions import ACTIVATIONS, soft_cap
from edge.backends.tvm.gpu.kernels.norms import Norm, Statistics, apply, inverse_root, row_statistics
from edge.backends.tvm.gpu.kernels.quants import QUADS, Sum, Words, as_floats, floats_of, needs_sums, sum_halves
from edge.backends.tvm.gpu.kernels.threads import (
    WARP,
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    barrier,
    begin,
    build,
    f32,
    hold,
    i32,
    lane,
    let,
    loop,
    prefetch,
    quotient,
    remainder,
    select,
    spread,
    store,
    strided,
    to_int,
    total,
    warp_sum,
    when,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Matrix, Piece, Vector, WeightsLayout
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.shape import Shape

_LINE = 32  # words that are read at once


@dataclass(frozen=True)
class Factor:
    """A matrix of a product. at: its first column in the results. low: its LoRA adapter, B of which is multiplied by
    the matrix's A · x in `low`."""

    matrix: Matrix
    bias: Vector | None = None
    at: int = 0
    low: LowRank | None = None

    @classmethod
    def of(cls, layout: LayerLayout, name: str, at: int = 0) -> Factor:
        return cls(layout.matrix(name), layout.vector(f"{name}.bias"), at)


@dataclass(frozen=True)
class Epilogue:
    """The final step on results, in rows of `stride` values."""

    kind: str  # store; add to existing values; activate: activation(first factor) · second factor, or of the only one
    stride: int
    scale: float = 1.0  # of the results, bias included, before `cap`
    cap: float = 0.0
    activation: str = ""
    inputs: int = 0  # if not 0: also multiplied by rows of `inputs` of so many values
    share: tuple[int, int] | None = None  # (stride, place): also multiplied by this value of the token in `shares`


@dataclass(frozen=True)
class Residual:
    """A pending residual that a step's product first adds to its inputs: scale · norm(result of the previous
    product)."""

    norm: Norm
    scale: float


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
    """The rows of a workgroup, and the bundle that has them. Barriers stand outside of `each`, and of all conditions,
    since pocl 3.1 computes wrong sums otherwise."""

    scope: Scope
    product: Product
    starts: tuple[int, ...]  # each bundle's first workgroup, and the end
    first: Value  # its first row in the matrix
    rows: Value  # of the matrix
    at: Value  # first column of its results

    @classmethod
    def of(cls, scope: Scope, product: Product, height: int) -> Band:
        """The band of a workgroup with `height` rows."""
        starts, heads = _starts(product, height), [bundle[0] for bundle in product.bundles]

        def chosen(values: Sequence[int]) -> Value:
            found: Value = i32(values[-1])
            for start, value in zip(starts[-2:0:-1], values[-2::-1], strict=True):
                found = select(scope.group < start, i32(value), found)
            return found

        first = hold((scope.group - chosen(starts[:-1])) * height, "int32")
        rows = hold(chosen([head.matrix.rows for head in heads]), "int32")
        return cls(scope, product, starts, first, rows, hold(chosen([head.at for head in heads]), "int32"))

    def each(self) -> Iterator[Sequence[Factor]]:
        """Iterate over bundles, each inside the condition that the workgroup has it."""
        for number, bundle in enumerate(self.product.bundles):
            with self._only(number):
                yield bundle

    @contextmanager
    def _only(self, number: int) -> Iterator[None]:
        if len(self.product.bundles) == 1:
            yield
            return
        group, start, stop = self.scope.group, self.starts[number], self.starts[number + 1]
        with when(T.And(group >= start, group < stop)):
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
        if self.product.adapted:
            for bundle in self.each():
                for value, factor in zip(values, bundle, strict=True):
                    if factor.low:
                        self._add_low_rank(value, factor, factor.low, row, token)
        at = let(token * epilogue.stride + row + self.at)
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

    def _add_low_rank(self, value: Register, factor: Factor, low: LowRank, row: Value, token: Value) -> None:
        """value += row of B · A x, which `low` has for all matrices of the product."""
        factors, quads = self.product.factors, low.row_words // 4
        x_at = let((token * len(factors) + factors.index(factor)) * (low.rank // 4))
        b_at, found = let(row * quads + low.at // 4), Register(spread(f32(0.0)), "float32x4")
        with loop(0, quads) as quad:
            weights = floats_of(let(self.scope.lora4[b_at + quad]), low.a.kind)
            for index, each in enumerate(weights):
                found.value = found.value + each * self.scope.low[x_at + quad * len(weights) + index]
        value.value = value.value + total(found.value)


def workgroups(product: Product, height: int) -> int:
    """The number of workgroups with `height` rows each."""
    return _starts(product, height)[-1]


def _starts(product: Product, height: int) -> tuple[int, ...]:
    return tuple(accumulate((-(-bundle[0].matrix.rows // height) for bundle in product.bundles), initial=0))


def step(product: Product, tuning: Tuning, *, last: bool = False) -> Built:
    """Build the kernel for one token: row 0 of `x`, or the last row of a pass (`last`).

    Buffers: out float32; x float32x4 [rows, columns]; w4, w1 the weights; rest, for a norm that lies elsewhere; tables
    for `last`; low, lora4 for adapters.
    With a residual: raw float32x4, which is normalized with weights in residual_w4 and added to x; sums float32x4
    receives the sum, since other workgroups still read x.
    """
    if tuning.workgroup < WARP:
        tuning = replace(tuning, stage=0)
    split = split_of(product.columns, tuning)
    height = tuning.workgroup // split * tuning.rows
    slots = (1 + product.paired) * tuning.rows + 1

    def body(scope: Scope) -> None:
        memory = scope.shared(slots * scope.threads)
        band = Band.of(scope, product, height)
        if tuning.stage:
            band.prefetch(height)
            begin()
        row = hold(to_int(scope.tables[State.COUNT]) - 1, "int32") if last else i32(0)
        inputs = _Inputs.of(scope, product, let(row * (product.columns // 4)), memory, split)
        if 4 * slots * scope.threads + 16 * QUADS * _stride(product) <= tuning.stage:
            inputs = inputs.stage(memory, (slots - 1) * scope.threads)
        _multiply(scope, product, band, inputs, memory, split, tuning)

    reads = {"x": "float32x4", "w4": "uint32x4", "w1": "uint32"}
    reads |= {"rest": "uint32x4"} if product.norm and product.norm_in_rest else {}
    reads |= {"raw": "float32x4", "residual_w4": "uint32x4"} if product.residual else {}
    reads |= product.reads | ({"tables": "uint32"} if last else {})
    writes = {"out": "float32"} | ({"sums": "float32x4"} if product.residual else {})
    groups = (workgroups(product, height), 1)
    return build(product.name, tuning.workgroup, reads, writes, (), body, groups)


def split_of(columns: int, tuning: Tuning) -> int:
    """Threads that share a row of a step's product."""
    return min(tuning.split, _power_of_two(columns // PART), tuning.workgroup)


def _stride(product: Product) -> int:
    """Vectors from a part's first to its second one in shared memory; odd, so that writers hit different banks."""
    return product.columns // PART | 1


@contextmanager
def _always() -> Iterator[None]:
    yield


def _power_of_two(count: int) -> int:
    """The smallest power of two that is not below `count`."""
    return 1 << (count - 1).bit_length()


@dataclass(frozen=True)
class _Inputs:
    """A kernel's access to its activations."""

    scope: Scope
    product: Product
    first: Value  # their row's start in `x`, in units of 4
    weights: Words  # of the norm
    writes: Value  # this thread writes their sums with the residual
    residual_statistics: Statistics | None = None  # of the residual's norm
    statistics: Statistics | None = None  # of a LayerNorm
    staged: Buffer | None = None  # all of them in shared memory, normalized but for a late scale
    squared: Value | None = None  # the sum of their squares, if they are staged and scaled late

    @classmethod
    def of(cls, scope: Scope, product: Product, first: Value, memory: Buffer, split: int) -> _Inputs:
        weights = Words(scope.rest, scope.rest) if product.norm_in_rest else Words(scope.w4, scope.w1)
        inputs = cls(scope, product, first, weights, T.And(scope.group == 0, scope.thread < split))
        if residual := product.residual:

            def read_raw(at: Value) -> list[Value]:
                return _lanes(scope.raw[first + at])

            inputs = replace(inputs, residual_statistics=row_statistics(scope, memory, residual.norm, read_raw, 4))
        if product.norm and product.norm.kind == "layer":

            def read(at: Value) -> list[Value]:
                return _lanes(inputs.hidden(at))

            inputs = replace(inputs, statistics=row_statistics(scope, memory, product.norm, read, 4))
        return inputs

    def hidden(self, at: Value) -> Value:
        """Hidden states 4 · at …, with the residual added."""
        x, residual = let(self.scope.x[self.first + at]), self.product.residual
        if not residual or not self.residual_statistics:
            return x
        norm, quads = residual.norm, self.scope.residual_w4
        weight, bias = (
            as_floats(let(quads[at + vector.at // 4])) if vector else None for vector in (norm.weight, norm.bias)
        )
        added = apply(let(self.scope.raw[self.first + at]), self.residual_statistics.spread(), weight, bias)
        return hold(x + (added * spread(f32(residual.scale)) if residual.scale != 1 else added), "float32x4")

    def stage(self, memory: Buffer, scratch: int) -> _Inputs:
        """Bring them to shared memory: the first vectors of all parts, then the second ones …, since threads side by
        side read parts side by side. scratch: the first of as many elements of memory as there are threads."""
        scope, stride = self.scope, _stride(self.product)
        staged, squares = scope.shared(QUADS * stride, "float32x4"), Register(spread(f32(0.0)), "float32x4")
        with strided(scope, self.product.columns // 4) as at:
            x = self.hidden(at)
            if self.product.residual:
                with when(scope.group == 0):
                    store(scope.sums, self.first + at, x)
            if self.is_scaled_late:
                squares.value = squares.value + x * x
            norm, weights = self.product.norm, self.weights
            read = [weights.vector_quad(each, at) for each in (norm.weight, norm.bias) if each] if norm else []
            store(staged, remainder(at, QUADS) * stride + quotient(at, QUADS), self._normed(x, *read))
        if not self.is_scaled_late:
            barrier()
            return replace(self, staged=staged)
        together = min(scope.threads, WARP)
        store(memory, scope.thread + scratch, warp_sum(total(squares.value), together))
        barrier()
        squared = added(memory, i32(scratch), scope.threads // together, together)
        return replace(self, staged=staged, squared=squared)

    def _normed(self, x: Value, weight: Value | None = None, bias: Value | None = None) -> Value:
        """A vector, normalized but for a late scale."""
        if weight is None:
            return x
        return hold(
            x * weight if self.statistics is None else apply(x, self.statistics.spread(), weight, bias), "float32x4"
        )

    @property
    def is_scaled_late(self) -> bool:
        return self.product.norm is not None and self.product.norm.kind == "rms"

    def read(self, part: Value, squares: Register) -> list[Value]:
        """The 32 activations of a part, in vectors of 4. squares: accumulates their squares, if they are scaled
        late."""
        if self.staged is not None:
            return [let(self.staged[part + index * _stride(self.product)]) for index in range(QUADS)]
        norm, at = self.product.norm, let(part * QUADS)
        x = [self.hidden(at + index) for index in range(QUADS)]
        if self.product.residual:
            with when(self.writes):
                for index, each in enumerate(x):
                    store(self.scope.sums, self.first + at + index, each)
        if self.is_scaled_late:
            for each in x:
                squares.value = squares.value + each * each
        if not norm:
            return x
        vectors = (self.weights.vector(each, part) for each in (norm.weight, norm.bias) if each)
        return [self._normed(*each) for each in zip(x, *vectors, strict=True)]


def _lanes(vector: Value) -> list[Value]:
    vector = let(vector)
    return [lane(vector, index) for index in range(4)]


def _multiply(
    scope: Scope, product: Product, band: Band, inputs: _Inputs, memory: Buffer, split: int, tuning: Tuning
) -> None:
    """Multiply the rows of a workgroup."""
    words, parts, rows = Words(scope.w4, scope.w1), product.columns // PART, tuning.rows
    together = min(split, WARP) if tuning.stage else 1  # threads that add their sums without shared memory
    team, place = let(quotient(scope.thread, split)), let(remainder(scope.thread, split))
    teams, factors = scope.threads // split, 1 + product.paired
    own = [let(T.min(band.first + team * rows + index, band.rows - 1)) for index in range(rows)]
    sums = [Sum() for _ in range(rows * factors)]
    squares = Register(spread(f32(0.0)), "float32x4")
    for bundle in band.each():
        summed = any(needs_sums(factor.matrix.block) for factor in bundle)
        with loop(0, -(-parts // split)) as turn:
            part = let(turn * split + place)
            with when(part < parts) if parts % split else _always():
                x = inputs.read(part, squares)
                x_sums = sum_halves(x) if summed else []
                for number, factor in enumerate(bundle):
                    for index, row in enumerate(own):
                        sums[number * rows + index].add(words, factor.matrix, row, part, x, x_sums)

    found = [each.value for each in sums]
    if inputs.is_scaled_late and inputs.squared is None:
        found.append(total(squares.value))
    if together > 1:
        found = [warp_sum(each, together) for each in found]
    for slot, value in enumerate(found):
        store(memory, scope.thread + slot * scope.threads, value)
    barrier()
    with strided(scope, teams * rows) as local:
        row = let(band.first + local)
        with when(row < band.rows):
            sums_at = let(quotient(local, rows) * split)
            own_at = let(sums_at + remainder(local, rows) * scope.threads)
            totals = [
                added(memory, own_at + n * rows * scope.threads, split // together, together) for n in range(factors)
            ]
            if inputs.is_scaled_late and product.norm:
                squared = inputs.squared
                if squared is None:
                    squared = added(memory, sums_at + (len(found) - 1) * scope.threads, split // together, together)
                scale = hold(inverse_root(squared, product.norm))
                totals = [each * scale for each in totals]
            band.finish(row, i32(0), totals)


def added(memory: Buffer, start: Value, count: int, step: int = 1) -> Value:
    """The sum of `count` values in shared memory, each `step` behind the one before."""
    start = let(start)
    return hold(fold(lambda one, other: one + other, [memory[start + at * step] for at in range(count)]))
