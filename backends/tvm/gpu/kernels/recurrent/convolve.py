"""Causal convolutions: the gated one of `edge.model.cores.ShortConvolution`, and those within recurrent cores."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.gpu.design import State
from edge.backends.tvm.gpu.kernels.threads import (
    Built,
    Register,
    Scope,
    Value,
    as_float,
    build,
    f32,
    let,
    loop,
    select,
    store,
    to_int,
    when,
)
from edge.backends.tvm.gpu.weights import Vector
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import ShortConvolution

_THREADS = 64


@dataclass(frozen=True)
class Causal:
    """A convolution within a core: its inputs are `mixed` values from `first` on of a token's row of `channels`, of
    `stride` values. The state has the last `kernel` − 1 rows of inputs. taps: in the buffer w1, [mixed, kernel]."""

    taps: Vector
    mixed: int
    kernel: int
    first: int
    stride: int

    def at(self, scope: Scope, channel: Value) -> Value:
        """A channel's value for token `scope.row`."""
        total = Register(f32(0.0))
        for tap in range(self.kernel):
            weight = let(as_float(scope.w1[channel * self.kernel + tap + self.taps.at]))
            source = let(scope.row + (tap - (self.kernel - 1)))
            with when(source >= 0):
                total.value = total.value + weight * scope.channels[source * self.stride + self.first + channel]
            with when(source < 0):
                row = source + (self.kernel - 1)
                total.value = total.value + weight * scope.states[scope.state + row * self.mixed + channel]
        return total.value

    def keep(self, scope: Scope, count: Value, groups: int) -> None:
        """Write the last inputs to the state; all `groups` workgroups of a kernel divide the channels."""
        with loop(0, -(-self.mixed // (groups * scope.threads))) as turn:
            channel = let((turn * groups + scope.group) * scope.threads + scope.thread)
            with when(channel < self.mixed):
                for row in range(self.kernel - 1):
                    target, token = let(scope.state + row * self.mixed + channel), let(count - (self.kernel - 1 - row))
                    with when(token >= 0):
                        store(scope.states, target, scope.channels[token * self.stride + self.first + channel])
                    with when(token < 0):
                        store(scope.states, target, scope.states[target + count * self.mixed])


def convolve(name: str, core: ShortConvolution, taps: Vector) -> Built:
    """Compute `mixed`, float32 [tokens, padded hidden], from the rows (B, C, z) in `channels`. A thread has one channel
    of all tokens: its last inputs move through registers.

    Scalars: state, the layer's first value in `states`. Buffers: w1 has the taps, [hidden, kernel].
    """
    padded = round_up(core.hidden, 32)

    def body(scope: Scope) -> None:
        channel = let(scope.group * _THREADS + scope.thread)
        with when(channel < padded):
            own = let(T.min(channel, core.hidden - 1))
            weights = [let(as_float(scope.w1[own * core.kernel + tap + taps.at])) for tap in range(core.kernel)]
            states = [let(scope.state + own + row * core.hidden) for row in range(core.kernel - 1)]
            past = [Register(f32(0.0)) for _ in states]
            with when(channel < core.hidden):  # other threads write their last channel's state
                for at, each in zip(states, past, strict=True):
                    each.value = scope.states[at]
            with loop(0, to_int(scope.tables[State.COUNT])) as token:
                at = let(token * core.channels + own)
                new = let(scope.channels[at] * scope.channels[at + 2 * core.hidden])
                mixed: Value = weights[-1] * new
                for weight, each in zip(weights, past, strict=False):
                    mixed = mixed + weight * each.value
                mixed = mixed * scope.channels[at + core.hidden]
                store(scope.mixed, token * padded + channel, select(channel < core.hidden, mixed, f32(0.0)))
                for each, after in pairwise(past):
                    each.value = after.value
                past[-1].value = new
            with when(channel < core.hidden):
                for at, each in zip(states, past, strict=True):
                    store(scope.states, at, each.value)

    reads = {"channels": "float32", "w1": "uint32", "tables": "uint32"}
    writes = {"mixed": "float32", "states": "float32"}
    return build(name, _THREADS, reads, writes, ("state",), body, (-(-padded // _THREADS), 1))
