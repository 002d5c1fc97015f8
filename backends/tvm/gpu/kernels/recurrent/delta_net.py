"""The recurrence of `edge.model.cores.DeltaNet`, in three kernels.

`mix` convolves the channels of all tokens at once. `recur` goes from token to token: the columns of a head's state are
independent, so a workgroup has `COLUMNS` of them, and its threads divide the rows, which stay in registers. `finish`
needs all of a head's columns.

A row of `channels` has the inputs of the convolution, z, β and α. A row of `convolved` has queries, keys and values,
then each head's decay, then each head's β. A layer's state is the convolution's last inputs, [kernel − 1, mixed], and
the matrices [head, size, value_size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce as fold

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.kernels.functions import sigmoid, silu, softplus
from edge.backends.tvm.gpu.kernels.recurrent.convolve import Causal
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
    hold,
    i32,
    let,
    loop,
    quotient,
    reduce,
    remainder,
    select,
    store,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Vector
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import DeltaNet, KimiDelta

COLUMNS = 16  # of a head's state in a workgroup
_MOST_ROWS = 32  # of a thread, if there are threads enough
_MOST_PARTS = 16  # threads that share a column; sizes are multiples of it
_THREADS = 64  # of the other kernels
_EPSILON = 1e-6  # of the lengths of queries and keys


@dataclass(frozen=True)
class Recurrence:
    """A gated delta net, or Kimi Delta Attention, and its vectors, in the buffer w1. epsilon: of its norm."""

    core: DeltaNet | KimiDelta
    taps: Vector  # [mixed, kernel]
    rates: Vector
    biases: Vector  # of α
    norm: Vector
    epsilon: float

    @classmethod
    def of(cls, core: DeltaNet | KimiDelta, layout: LayerLayout, epsilon: float) -> Recurrence:
        taps = [each for each in map(layout.vector, core.convolutions) if each]
        rates, biases, norm = (each for each in map(layout.vector, ("ssm_a", "ssm_dt.bias", "ssm_norm")) if each)
        assert all(
            each.at == taps[0].at + index * taps[0].size for index, each in enumerate(taps)
        )  # one behind another
        return cls(core, taps[0], rates, biases, norm, epsilon)

    @property
    def keyed(self) -> bool:
        """Whether each value of a key has a decay."""
        return isinstance(self.core, KimiDelta)

    @property
    def convolution(self) -> Causal:
        return Causal(self.taps, self.core.mixed, self.core.kernel, 0, self.core.channels)


def mix(name: str, of: Recurrence, tokens: int) -> Built:
    """Fill `convolved` from `channels`: SiLU of the convolution, queries and keys to length 1, queries divided by
    √size; the gates. A workgroup has a head of queries, keys or values, of one token. Scalars: state."""
    core = of.core
    keys = 2 * core.key_heads  # and queries
    most = max(core.size, core.value_size)

    def body(scope: Scope) -> None:
        memory, mixed, squares = scope.shared(_THREADS), scope.shared(most), Register(f32(0.0))
        is_value = scope.group >= keys
        size = select(is_value, i32(core.value_size), i32(core.size))
        behind = keys * core.size + (scope.group - keys) * core.value_size
        first = hold(select(is_value, behind, scope.group * core.size), "int32")
        with strided(scope, size) as index:
            value = hold(silu(of.convolution.at(scope, first + index)))
            store(mixed, index, value)
            squares.value = squares.value + value * value
        length = reduce(scope, memory, squares.value, _THREADS, lambda one, other: one + other)
        factor = f32(1.0) / T.sqrt(length + f32(_EPSILON))
        factor = factor * select(scope.group < core.key_heads, f32(core.size**-0.5), f32(1.0))
        factor = hold(select(is_value, f32(1.0), factor))
        at = let(scope.row * core.convolved)
        with strided(scope, size) as index:
            store(scope.convolved, at + first + index, mixed[index] * factor)
        head = let(scope.group - keys)
        if of.keyed:
            with when(is_value):
                _keyed_gates(scope, of, at, head)
            return
        with when(T.And(is_value, scope.thread == 0)):
            beta = let(scope.row * core.channels + core.mixed + core.width + head)
            rate, bias = (as_float(scope.w1[head + vector.at]) for vector in (of.rates, of.biases))
            decay = T.exp(rate * softplus(scope.channels[beta + core.heads] + bias))
            store(scope.convolved, at + core.mixed + head, decay)
            store(scope.convolved, at + core.mixed + core.heads + head, sigmoid(scope.channels[beta]))

    reads = {"channels": "float32", "states": "float32", "w1": "uint32"}
    groups = (keys + core.heads, tokens)
    return build(name, _THREADS, reads, {"convolved": "float32"}, ("state",), body, groups, 1)


def _keyed_gates(scope: Scope, of: Recurrence, at: Value, head: Value) -> None:
    """Decays of a head's keys, and β, to a row of `convolved`, which begins at `at`."""
    core, row = of.core, let(scope.row * of.core.channels)
    assert isinstance(core, KimiDelta)
    rate = let(as_float(scope.w1[head + of.rates.at]))
    with strided(scope, core.size) as index:
        own = let(head * core.size + index)
        alpha = hold(scope.channels[row + core.mixed + core.width + own] + as_float(scope.w1[own + of.biases.at]))
        decay = f32(core.bound) * sigmoid(rate * alpha) if core.bound else rate * softplus(alpha)
        store(scope.convolved, at + core.mixed + own, T.exp(decay))
    with when(scope.thread == 0):
        beta = sigmoid(scope.channels[row + core.mixed + 2 * core.width + head])
        store(scope.convolved, at + core.mixed + core.width + head, beta)


def recur(name: str, of: Recurrence) -> Built:
    """Advance the state over all tokens, and write o to `mixed`, float32 [tokens, padded width]. Scalars: state.

    With p = Sᵀ k and o = Sᵀ q of the state S before a token, v' = β (v − g p), S becomes g S + k v'ᵀ, and the output is
    g o + (q · k) v': one pass over S, and one exchange between threads. Where each row has a g, p and o are those of
    diag(g) S.
    """
    core = of.core
    parts, slices, padded = parts_of(core.size), core.value_size // COLUMNS, round_up(core.width, 32)
    rows, threads = core.size // parts, COLUMNS * parts

    def body(scope: Scope) -> None:
        memory = [scope.shared(threads) for _ in range(3)] if parts > 1 else []
        count = hold(to_int(scope.tables[State.COUNT]), "int32")
        head = let(quotient(scope.group, slices))
        part, own = let(quotient(scope.thread, COLUMNS)), let(remainder(scope.thread, COLUMNS))
        column = let(remainder(scope.group, slices) * COLUMNS + own)
        first = let((head * core.size + part * rows) * core.value_size + column)
        first = let(scope.state + (core.kernel - 1) * core.mixed + first)
        state = [Register(scope.states[first + row * core.value_size]) for row in range(rows)]
        query_at = let(remainder(head, core.key_heads) * core.size + part * rows)
        with loop(0, count) as token:
            at = let(token * core.convolved)
            found, out, both = (Register(f32(0.0)) for _ in range(3))
            for row, each in enumerate(state):
                if of.keyed:
                    own = let(at + core.mixed + head * core.size + part * rows)
                    each.value = each.value * scope.convolved[own + row]
                query = let(scope.convolved[at + query_at + row])
                key = let(scope.convolved[at + query_at + (core.key_heads * core.size + row)])
                found.value = found.value + key * each.value
                out.value = out.value + query * each.value
                both.value = both.value + query * key
            sums = totals(scope, memory, [each.value for each in (found, out, both)], own)
            value = scope.convolved[at + 2 * core.key_heads * core.size + head * core.value_size + column]
            decay = f32(1.0) if of.keyed else let(scope.convolved[at + core.mixed + head])
            beta = scope.convolved[at + core.mixed + (core.width if of.keyed else core.heads) + head]
            change = hold(beta * (value - decay * sums[0]))
            for row, each in enumerate(state):
                key = let(scope.convolved[at + query_at + (core.key_heads * core.size + row)])
                each.value = each.value * decay + key * change
            with when(part == 0):
                store(scope.mixed, token * padded + head * core.value_size + column, decay * sums[1] + sums[2] * change)
        for row, each in enumerate(state):
            store(scope.states, first + row * core.value_size, each.value)
        of.convolution.keep(scope, count, core.heads * slices)

    reads = {"convolved": "float32", "channels": "float32", "tables": "uint32"}
    writes = {"mixed": "float32", "states": "float32"}
    return build(name, threads, reads, writes, ("state",), body, (core.heads * slices, 1))


def finish(name: str, of: Recurrence, tokens: int) -> Built:
    """RMSNorm of each head in `mixed`, times SiLU(z)."""
    core, padded = of.core, round_up(of.core.width, 32)

    def body(scope: Scope) -> None:
        memory, squares = scope.shared(_THREADS), Register(f32(0.0))
        at = let(scope.row * padded + scope.group * core.value_size)
        gate = let(scope.row * core.channels + core.mixed + scope.group * core.value_size)
        with strided(scope, core.value_size) as index:
            value = let(scope.mixed[at + index])
            squares.value = squares.value + value * value
        total = reduce(scope, memory, squares.value, _THREADS, lambda one, other: one + other)
        scale = hold(f32(1.0) / T.sqrt(total * f32(1 / core.value_size) + f32(of.epsilon)))
        with strided(scope, core.value_size) as index:
            value = scope.mixed[at + index] * scale * as_float(scope.w1[index + of.norm.at])
            activate = sigmoid if of.keyed else silu
            store(scope.mixed, at + index, value * activate(scope.channels[gate + index]))

    reads = {"channels": "float32", "w1": "uint32"}
    return build(name, _THREADS, reads, {"mixed": "float32"}, (), body, (core.heads, tokens), 1)


def totals(scope: Scope, memory: Sequence[Buffer], values: Sequence[Value], own: Value) -> Sequence[Value]:
    """The sums of all threads that share column `own`. memory: shared, for each value an element per thread; none where
    threads do not share."""
    if not memory:
        return values
    for each, value in zip(memory, values, strict=True):
        store(each, scope.thread, value)
    barrier()
    shared = range(0, scope.threads, COLUMNS)
    found = [hold(fold(lambda one, other: one + other, [each[own + at] for at in shared])) for each in memory]
    barrier()
    return found


def parts_of(size: int) -> int:
    """Threads that share a column of a state with `size` rows."""
    parts = 1
    while size // parts > _MOST_ROWS and parts < _MOST_PARTS:
        parts *= 2
    return parts
