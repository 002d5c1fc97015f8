"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450) of rows. Padding is zero and stays so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.kernels.threads import (
    Buffer,
    Built,
    Register,
    Scope,
    Value,
    as_float,
    build,
    f32,
    hold,
    i32,
    let,
    reduce,
    spread,
    store,
    strided,
    to_int,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Vector
from edge.backends.tvm.packing.cores import round_up
from edge.backends.tvm.packing.shape import Shape

_THREADS = 64  # of a workgroup, which normalises one row


@dataclass(frozen=True)
class Norm:
    """A norm."""

    kind: str  # rms or layer
    weight: Vector  # like bias in the kernel's buffer of weights
    bias: Vector | None
    width: int  # values of a row
    epsilon: float

    @property
    def padded(self) -> int:
        return round_up(self.width, 32)

    @classmethod
    def of(cls, layout: LayerLayout, name: str, shape: Shape) -> Norm | None:
        """The hidden states' norm of this name, if the model has it."""
        weight = layout.vector(name)
        bias = layout.vector(f"{name}.bias")
        return cls(shape.norm, weight, bias, shape.hidden, shape.norm_eps) if weight else None


@dataclass(frozen=True)
class Statistics:
    """A row's statistics: it is normalized to (x − mean) · scale, times weights and plus biases. RMSNorm has no
    mean."""

    scale: Value
    mean: Value | None = None

    def spread(self) -> Statistics:
        """The statistics as vectors of 4."""
        return Statistics(spread(self.scale), None if self.mean is None else spread(self.mean))


def row_statistics(
    scope: Scope, memory: Buffer, norm: Norm, read: Callable[[Value], Sequence[Value]], at_once: int = 1
) -> Statistics:
    """Compute a row's statistics by all threads of a workgroup. memory: shared, an element for each of them.

    read: returns values i · at_once … of the padded row.
    """

    def total(term: Callable[[Value], Value]) -> Value:
        found = Register(f32(0.0))
        with strided(scope, norm.padded // at_once) as at:
            for value in read(at):
                found.value = found.value + term(hold(value))
        return reduce(scope, memory, found.value, scope.threads, lambda one, other: one + other)

    if norm.kind == "rms":
        return Statistics(hold(inverse_root(total(lambda x: x * x), norm)))
    mean = hold(total(lambda x: x) * f32(1 / norm.width))
    squares = total(lambda x: (x - mean) * (x - mean))
    squares = squares - mean * mean * f32(float(norm.padded - norm.width))  # the padding's part
    return Statistics(hold(inverse_root(squares, norm)), mean)


def inverse_root(squares: Value, norm: Norm) -> Value:
    """1 / sqrt(mean + ε) of a sum of squares."""
    return f32(1.0) / T.sqrt(squares * f32(1 / norm.width) + f32(norm.epsilon))


def apply(x: Value, statistics: Statistics, weight: Value, bias: Value | None) -> Value:
    centered = x if statistics.mean is None else x - statistics.mean
    scaled = centered * statistics.scale * weight
    return scaled if bias is None else scaled + bias


def normalise(name: str, norm: Norm, tokens: int, *, wanted: bool = False) -> Built:
    """Normalize rows of `x` into `out`, both float32 [tokens, padded width]; weights are in `w1`.

    wanted: only the last State.WANTED rows of a pass, which become the first of `out`. tokens: the maximum.
    """

    def body(scope: Scope) -> None:
        memory = scope.shared(_THREADS)
        first: Value = i32(0)
        if wanted:
            first = to_int(scope.tables[State.COUNT]) - to_int(scope.tables[State.WANTED])
        source = hold(T.min(first + scope.row, to_int(scope.tables[State.COUNT]) - 1) * norm.padded, "int32")
        target = let(scope.row * norm.padded)
        statistics = row_statistics(scope, memory, norm, lambda at: [scope.x[source + at]])
        with strided(scope, norm.padded) as at:
            store(scope.out, target + at, _applied(scope, norm, scope.x[source + at], statistics, at))

    reads = {"x": "float32", "w1": "uint32", "tables": "uint32"}
    return build(name, _THREADS, reads, {"out": "float32"}, (), body, (1, tokens), 0 if wanted else 1)


def add_normed(name: str, norm: Norm, tokens: int, scale: float = 1.0, rescale: Vector | None = None) -> Built:
    """`out` += scale · norm(`x`), rows of float32 [tokens, padded width]; weights are in `w1`. rescale: one value, by
    which the sum is multiplied."""

    def body(scope: Scope) -> None:
        memory = scope.shared(_THREADS)
        start = let(scope.row * norm.padded)
        statistics = row_statistics(scope, memory, norm, lambda at: [scope.x[start + at]])
        with strided(scope, norm.padded) as at:
            added = _applied(scope, norm, scope.x[start + at], statistics, at)
            total = scope.out[start + at] + (added * f32(scale) if scale != 1 else added)
            store(scope.out, start + at, total * as_float(scope.w1[rescale.at]) if rescale else total)

    reads = {"x": "float32", "w1": "uint32"}
    return build(name, _THREADS, reads, {"out": "float32"}, (), body, (1, tokens), 1)


def clip(name: str, bounds: tuple[Vector, Vector], stride: int, tokens: int) -> Built:
    """Clip rows of `out`, float32 [tokens, stride], in place, between two values in `w1`."""

    def body(scope: Scope) -> None:
        low, high = (let(as_float(scope.w1[i32(bound.at)])) for bound in bounds)
        with strided(scope, stride) as at:
            own = let(scope.row * stride + at)
            store(scope.out, own, T.max(T.min(scope.out[own], high), low))

    return build(name, _THREADS, {"w1": "uint32"}, {"out": "float32"}, (), body, (1, tokens), 1)


def _applied(scope: Scope, norm: Norm, x: Value, statistics: Statistics, at: Value) -> Value:
    weight = as_float(scope.w1[at + norm.weight.at])
    bias = as_float(scope.w1[at + norm.bias.at]) if norm.bias else None
    return apply(x, statistics, weight, bias)
