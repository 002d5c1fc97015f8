"""The recurrence of `edge.model.cores.SelectiveScan`, in three kernels.

A row of `channels` has the inputs of the convolution, then z; one of `convolved` has its outputs; one of `latents` dt,
B and C; one of `expanded` the products of `ssm_dt`. A layer's state is the convolution's last inputs, [kernel − 1,
width], and [width / LANES, size, LANES].
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.kernels.functions import silu, softplus
from edge.backends.tvm.gpu.kernels.recurrent.convolve import Causal
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
    select,
    store,
    strided,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import LayerLayout, Vector
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import LANES, SelectiveScan

_THREADS = 64


@dataclass(frozen=True)
class Selection:
    """A selective scan and its vectors, in the buffer w1."""

    core: SelectiveScan
    taps: Vector  # [width, kernel]
    taps_bias: Vector
    rates: Vector  # [width, size]
    skips: Vector
    norms: tuple[Vector | None, ...]  # of dt, B and C

    @classmethod
    def of(cls, core: SelectiveScan, layout: LayerLayout) -> Selection:
        names = ("ssm_conv1d", "ssm_conv1d.bias", "ssm_a", "ssm_d")
        taps, taps_bias, rates, skips = (each for each in map(layout.vector, names) if each)
        return cls(core, taps, taps_bias, rates, skips, tuple(layout.vector(name) for name, *_ in core.parts))

    @property
    def convolution(self) -> Causal:
        return Causal(self.taps, self.core.width, self.core.kernel, 0, self.core.channels)


def mix(name: str, of: Selection, tokens: int) -> Built:
    """Fill `convolved` from `channels`: SiLU of the convolution. Scalars: state."""
    core = of.core

    def body(scope: Scope) -> None:
        channel = let(scope.group * _THREADS + scope.thread)
        with when(channel < core.width):
            bias = as_float(scope.w1[channel + of.taps_bias.at])
            value = silu(of.convolution.at(scope, channel) + bias)
            store(scope.convolved, scope.row * core.width + channel, value)

    reads = {"channels": "float32", "states": "float32", "w1": "uint32"}
    groups = (-(-core.width // _THREADS), tokens)
    return build(name, _THREADS, reads, {"convolved": "float32"}, ("state",), body, groups, 1)


def normalise(name: str, of: Selection, tokens: int) -> Built:
    """dt of each token to `ranked`, float32 [tokens, padded rank]; B and C in place. A workgroup has a token."""
    core, padded = of.core, round_up(of.core.rank, 32)

    def body(scope: Scope) -> None:
        memory, row = scope.shared(_THREADS), let(scope.row * core.selected)
        for weight, (_, first, count) in zip(of.norms, core.parts, strict=True):
            squares, scale = Register(f32(0.0)), None
            if core.norms:
                with strided(scope, count) as index:
                    value = let(scope.latents[row + first + index])
                    squares.value = squares.value + value * value
                total = reduce(scope, memory, squares.value, _THREADS, lambda one, other: one + other)
                scale = hold(f32(1.0) / T.sqrt(total * f32(1 / count) + f32(core.epsilon)))
            elif first:
                continue
            with strided(scope, count if first else padded) as index:
                own = index if first else let(T.min(index, count - 1))
                value = scope.latents[row + first + own]
                value = value if scale is None else value * scale
                value = value * as_float(scope.w1[own + weight.at]) if weight else value
                if first:
                    store(scope.latents, row + first + index, value)
                else:
                    store(scope.ranked, scope.row * padded + index, select(index < count, value, f32(0.0)))

    reads, writes = {"w1": "uint32"} if any(of.norms) else {}, {"ranked": "float32"}
    (writes if core.norms else reads)["latents"] = "float32"
    return build(name, _THREADS, reads, writes, (), body, (1, tokens), 1)


def scan(name: str, of: Selection) -> Built:
    """Advance the state over all tokens, and write gated outputs to `mixed`, float32 [tokens, padded width]. A thread
    has a channel. Scalars: state."""
    core, padded = of.core, round_up(of.core.width, 32)
    groups = -(-core.width // _THREADS)

    def body(scope: Scope) -> None:
        count = hold(to_int(scope.tables[State.COUNT]), "int32")
        channel = let(scope.group * _THREADS + scope.thread)
        with when(channel < core.width):
            first = quotient(channel, LANES) * (core.size * LANES) + remainder(channel, LANES)
            first = let(scope.state + (core.kernel - 1) * core.width + first)
            state = [Register(scope.states[first + index * LANES]) for index in range(core.size)]
            rates = [let(as_float(scope.w1[channel * core.size + index + of.rates.at])) for index in range(core.size)]
            skip = let(as_float(scope.w1[channel + of.skips.at]))
            with loop(0, count) as token:
                value, out = let(scope.convolved[token * core.width + channel]), Register(f32(0.0))
                step = hold(softplus(scope.expanded[token * padded + channel]))
                change, selected = hold(value * step), let(token * core.selected + core.rank)
                for index, (rate, each) in enumerate(zip(rates, state, strict=True)):
                    each.value = each.value * T.exp(rate * step) + scope.latents[selected + index] * change
                    out.value = out.value + each.value * scope.latents[selected + (core.size + index)]
                gate = silu(scope.channels[token * core.channels + core.width + channel])
                store(scope.mixed, token * padded + channel, (out.value + skip * value) * gate)
            for index, each in enumerate(state):
                store(scope.states, first + index * LANES, each.value)
        of.convolution.keep(scope, count, groups)

    buffers = ("convolved", "channels", "latents", "expanded")
    reads = dict.fromkeys(buffers, "float32") | {"w1": "uint32", "tables": "uint32"}
    writes = {"mixed": "float32", "states": "float32"}
    return build(name, _THREADS, reads, writes, ("state",), body, (groups, 1))
