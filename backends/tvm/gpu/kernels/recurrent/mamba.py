"""The recurrence of `edge.model.cores.Mamba`, in three kernels, as in `delta_net.py`.

A row of `channels` has z, the inputs of the convolution, and dt. A row of `convolved` has values, B and C, then each
head's decay, then each head's Δ. A layer's state is the convolution's last inputs, [kernel − 1, mixed], and the
matrices [head, size, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.kernels.functions import silu, softplus
from edge.backends.tvm.gpu.kernels.recurrent.convolve import Causal
from edge.backends.tvm.gpu.kernels.recurrent.delta_net import COLUMNS, parts_of, totals
from edge.backends.tvm.gpu.kernels.threads import (
    Built,
    Register,
    Scope,
    as_float,
    build,
    f32,
    hold,
    let,
    loop,
    quotient,
    reduce,
    remainder,
    store,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Vector
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Mamba

_THREADS = 64


@dataclass(frozen=True)
class Scan:
    """A Mamba-2 core and its vectors, in the buffer w1. epsilon: of its norm."""

    core: Mamba
    taps: Vector  # [mixed, kernel]
    taps_bias: Vector
    rates: Vector
    biases: Vector  # of dt
    skips: Vector
    norm: Vector | None
    epsilon: float

    @classmethod
    def of(cls, core: Mamba, layout: LayerLayout, epsilon: float) -> Scan:
        names = ("ssm_conv1d", "ssm_conv1d.bias", "ssm_a", "ssm_dt.bias", "ssm_d")
        taps, taps_bias, rates, biases, skips = (each for each in map(layout.vector, names) if each)
        return cls(core, taps, taps_bias, rates, biases, skips, layout.vector("ssm_norm"), epsilon)

    @property
    def convolution(self) -> Causal:
        return Causal(self.taps, self.core.mixed, self.core.kernel, self.core.width, self.core.channels)


def mix(name: str, of: Scan, tokens: int) -> Built:
    """Fill `convolved` from `channels`: SiLU of the convolution; decays and Δ. Scalars: state."""
    core = of.core

    def body(scope: Scope) -> None:
        channel, at = let(scope.group * _THREADS + scope.thread), let(scope.row * core.convolved)
        with when(channel < core.mixed):
            bias = as_float(scope.w1[channel + of.taps_bias.at])
            store(scope.convolved, at + channel, silu(of.convolution.at(scope, channel) + bias))
        with when(scope.group == 0), strided(scope, core.heads) as head:
            dt = scope.channels[scope.row * core.channels + core.width + core.mixed + head]
            step = hold(softplus(dt + as_float(scope.w1[head + of.biases.at])))
            decay = T.exp(as_float(scope.w1[head + of.rates.at]) * step)
            store(scope.convolved, at + core.mixed + head, decay)
            store(scope.convolved, at + core.mixed + core.heads + head, step)

    reads = {"channels": "float32", "states": "float32", "w1": "uint32"}
    groups = (-(-core.mixed // _THREADS), tokens)
    return build(name, _THREADS, reads, {"convolved": "float32"}, ("state",), body, groups, 1)


def scan(name: str, of: Scan) -> Built:
    """Advance the state over all tokens, and write y to `mixed`, float32 [tokens, padded width]. Scalars: state."""
    core = of.core
    parts, slices, padded = parts_of(core.size), core.head_dim // COLUMNS, round_up(core.width, 32)
    rows, threads = core.size // parts, COLUMNS * parts

    def body(scope: Scope) -> None:
        memory = [scope.shared(threads)] if parts > 1 else []
        count = hold(to_int(scope.tables[State.COUNT]), "int32")
        head = let(quotient(scope.group, slices))
        part, own = let(quotient(scope.thread, COLUMNS)), let(remainder(scope.thread, COLUMNS))
        column = let(remainder(scope.group, slices) * COLUMNS + own)
        first = let((head * core.size + part * rows) * core.head_dim + column)
        first = let(scope.state + (core.kernel - 1) * core.mixed + first)
        state = [Register(scope.states[first + row * core.head_dim]) for row in range(rows)]
        writes = let(quotient(head, core.heads // core.groups) * core.size + part * rows + core.width)
        skip = let(as_float(scope.w1[head + of.skips.at]))
        with loop(0, count) as token:
            at, out = let(token * core.convolved), Register(f32(0.0))
            value = let(scope.convolved[at + head * core.head_dim + column])
            decay = let(scope.convolved[at + core.mixed + head])
            change = hold(value * scope.convolved[at + core.mixed + core.heads + head])
            for row, each in enumerate(state):
                each.value = each.value * decay + scope.convolved[at + writes + row] * change
                out.value = out.value + each.value * scope.convolved[at + writes + (core.groups * core.size + row)]
            (total,) = totals(scope, memory, [out.value], own)
            with when(part == 0):
                store(scope.mixed, token * padded + head * core.head_dim + column, total + skip * value)
        for row, each in enumerate(state):
            store(scope.states, first + row * core.head_dim, each.value)
        of.convolution.keep(scope, count, core.heads * slices)

    reads = {"convolved": "float32", "channels": "float32", "w1": "uint32", "tables": "uint32"}
    writes = {"mixed": "float32", "states": "float32"}
    return build(name, threads, reads, writes, ("state",), body, (core.heads * slices, 1))


def finish(name: str, of: Scan, tokens: int) -> Built:
    """Multiply `mixed` by SiLU(z), and normalise each group, if there is a norm."""
    core, padded = of.core, round_up(of.core.width, 32)
    span, norm = core.width // core.groups, of.norm

    def body(scope: Scope) -> None:
        memory, squares = scope.shared(_THREADS), Register(f32(0.0))
        own = let(scope.group * span)
        at, gate = let(scope.row * padded + own), let(scope.row * core.channels + own)
        with strided(scope, span) as index:
            value = hold(scope.mixed[at + index] * silu(scope.channels[gate + index]))
            squares.value = squares.value + value * value
            store(scope.mixed, at + index, value)
        if norm is None:
            return
        total = reduce(scope, memory, squares.value, _THREADS, lambda one, other: one + other)
        scale = hold(f32(1.0) / T.sqrt(total * f32(1 / span) + f32(of.epsilon)))
        with strided(scope, span) as index:
            store(scope.mixed, at + index, scope.mixed[at + index] * scale * as_float(scope.w1[own + index + norm.at]))

    reads = {"channels": "float32"} | ({"w1": "uint32"} if norm else {})
    return build(name, _THREADS, reads, {"mixed": "float32"}, (), body, (core.groups, tokens), 1)
