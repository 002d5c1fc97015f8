"""The activations of a step's product: the hidden states of one token, with a pending residual and their norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.kernels.norms import Statistics, apply, row_statistics
from edge.backends.tvm.gpu.kernels.products.products import Product
from edge.backends.tvm.gpu.kernels.products.quants import QUADS, Words, as_floats
from edge.backends.tvm.gpu.kernels.threads import (
    WARP,
    Buffer,
    Register,
    Scope,
    Value,
    added,
    barrier,
    f32,
    hold,
    i32,
    lane,
    let,
    quotient,
    remainder,
    spread,
    store,
    strided,
    total,
    warp_sum,
    when,
)
from edge.backends.tvm.packing.blocks import PART


@dataclass(frozen=True)
class Inputs:
    """A kernel's access to its activations."""

    scope: Scope
    product: Product
    first: Value  # their row's start in `x`, in units of 4
    weights: Words  # of the norm
    writes: Value  # whether this thread writes their sums with the residual
    residual_statistics: Statistics | None = None  # of the residual's norm
    statistics: Statistics | None = None  # of a LayerNorm
    staged: Buffer | None = None  # all of them in shared memory, normalized but for a late scale
    squared: Value | None = None  # the sum of their squares, if they were brought to shared memory and are scaled late

    @classmethod
    def of(cls, scope: Scope, product: Product, first: Value, memory: Buffer, split: int) -> Inputs:
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
        more = apply(let(self.scope.raw[self.first + at]), self.residual_statistics.spread(), weight, bias)
        return hold(x + (more * spread(f32(residual.scale)) if residual.scale != 1 else more), "float32x4")

    def stage(self, memory: Buffer, scratch: int) -> Inputs:
        """Copy the activations to shared memory: the first vectors of all parts, then the second ones …, since adjacent
        threads read adjacent parts. scratch: as in `bring`."""
        stride = _stride(self.product)
        staged = self.scope.shared(QUADS * stride, "float32x4")

        def put(at: Value, x: Sequence[Value]) -> None:
            store(staged, remainder(at, QUADS) * stride + quotient(at, QUADS), x[0])

        found = self.bring(memory, scratch, self.product.columns // 4, lambda at: [at], put)
        return replace(found, staged=staged)

    def bring(
        self, memory: Buffer, scratch: int, items: int, places: Callable[[Value], Sequence[Value]],
        put: Callable[[Value, Sequence[Value]], None],
    ) -> Inputs:  # fmt: skip
        """Copy all vectors to shared memory, normalized but for a late scale; the workgroup's threads divide the items.
        places: the vectors of an item. put: stores them. scratch: first element of memory for one value per thread."""
        scope, norm, squares = self.scope, self.product.norm, Register(spread(f32(0.0)), "float32x4")
        with strided(scope, items) as item:
            found = []
            for at in places(item):
                x = self.hidden(at)
                if self.product.residual:
                    with when(scope.group == 0):
                        store(scope.sums, self.first + at, x)
                if self.is_scaled_late:
                    squares.value = squares.value + x * x
                read = [self.weights.vector_quad(each, at) for each in (norm.weight, norm.bias) if each] if norm else []
                found.append(self._normed(x, *read))
            put(item, found)
        if not self.is_scaled_late:
            barrier()
            return self
        together = min(scope.threads, WARP)
        store(memory, scope.thread + scratch, warp_sum(total(squares.value), together))
        barrier()
        return replace(self, squared=added(memory, i32(scratch), scope.threads // together, together))

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


def staged_bytes(product: Product) -> int:
    """Shared memory that `stage` takes."""
    return 16 * QUADS * _stride(product)


def _stride(product: Product) -> int:
    """Vectors from a part's first to its second one in shared memory; odd, so that writers hit different banks."""
    return product.columns // PART | 1


def _lanes(vector: Value) -> list[Value]:
    vector = let(vector)
    return [lane(vector, index) for index in range(4)]
