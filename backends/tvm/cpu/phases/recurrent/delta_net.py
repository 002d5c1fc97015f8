"""A gated delta net (`edge.model.cores.DeltaNet`): products; convolution and recurrence, head by head; output.

The recurrence runs token by token, in a chunk, too: the state of a head stays in the second-level cache meanwhile, and
is written in place. On CPUs this beat the chunked form (github.com/ikawrakow/ik_llama.cpp, pull request 1330).
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm.tirx.script.builder import ir as T

from edge.backends.tvm.cpu.kernels.functions import sigmoid, silu, softplus
from edge.backends.tvm.cpu.kernels.vectors import (
    Register,
    Value,
    exp,
    floats,
    i64,
    let,
    load,
    loop,
    remainder,
    spread,
    store,
    total,
)
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import multiply_rows, of_normalised
from edge.backends.tvm.cpu.phases.recurrent.convolution import Convolution
from edge.backends.tvm.cpu.phases.recurrent.states import for_drafts, inputs_at, sequences, state_at
from edge.backends.tvm.packing.cores import round_up, state_values
from edge.model.cores import DeltaNet, KimiDelta

_EPSILON = 1e-6  # of the lengths of queries and keys
DeltaCore = DeltaNet | KimiDelta
_AT_ONCE = 4  # vectors of a head's values that stay in registers while its state is read


def products(b: PassBuilder, layer: Value) -> None:
    """A token's row of `channels` has the inputs of the convolution, then z; of `steps` β, then α, each padded."""
    core = _core(b)
    with of_normalised(b, layer, "delta_in") as inputs:
        heads = round_up(core.heads, 16)
        channels, steps = (inputs_at(b, name, layer) for name in ("channels", "steps"))
        for name, rows, start in (
            ("attn_qkv", core.mixed, channels),
            ("attn_gate", core.width, channels + core.mixed),
            ("ssm_beta", heads, steps),
            ("ssm_alpha", heads, steps + heads),
        ):
            stride = 2 * heads if name.startswith("ssm") else core.mixed + core.width
            multiply_rows(b, layer, name, inputs, rows, start, stride)


def recur(b: PassBuilder, layer: Value) -> None:
    core = _core(b)
    with b.phase("delta_net", layer), b.dealt_out(i64(core.heads)) as head:
        Head(b, core, layer, head).run()
    convolution_of(b, layer).apply("delta_net")


def output(b: PassBuilder, layer: Value) -> None:
    convolution_of(b, layer).output("delta_out")


UNITS: dict[str, Unit] = {"delta_in": products, "delta_net": recur, "delta_out": output}


def _core(b: PassBuilder) -> DeltaNet:
    assert isinstance(b.block.core, DeltaNet)
    return b.block.core


def convolution_of(b: PassBuilder, layer: Value) -> Convolution:
    core = b.block.core
    assert isinstance(core, DeltaCore)
    channels = inputs_at(b, "channels", layer)
    return Convolution(b, layer, core.mixed, core.kernel, channels, core.mixed + core.width, core.convolutions)


class Head:
    """One head of values, for all tokens of the pass. faded: keys as the state before a token is read by them."""

    def __init__(self, b: PassBuilder, core: DeltaCore, layer: Value, head: Value) -> None:
        self.b, self.core, self.layer, self.head = b, core, layer, head
        work = let(b.at("work") + b.thread * b.at("part_stride"))
        self.query, self.key, self.value = work, let(work + core.size), let(work + 2 * core.size)
        self.faded = self.key

    def run(self) -> None:
        b, core, convolution = self.b, self.core, convolution_of(self.b, self.layer)
        key_head = let(remainder(self.head, core.key_heads))
        values_at = let(2 * core.key_heads * core.size + self.head * core.value_size)
        with sequences(b) as (begin, stop):
            memory = let(state_at(b, self.layer, begin) + (core.kernel - 1) * core.mixed)
            memory = for_drafts(b, let(memory + self.head * state_values(core)), state_values(core))
            with loop(begin, stop) as token:
                convolution.run(begin, token, let(key_head * core.size), core.size, self.query)
                convolution.run(begin, token, let((core.key_heads + key_head) * core.size), core.size, self.key, 1)
                convolution.run(begin, token, values_at, core.value_size, self.value, 2)
                self._normalise(self.query, core.size**-0.5)
                self._normalise(self.key, 1.0)
                decay, beta = self.gates(token)
                out = let(b.at("mixed") + token * round_up(core.width, 32) + self.head * core.value_size)
                for first in range(0, core.value_size // 16, _AT_ONCE):
                    parts = range(first, min(first + _AT_ONCE, core.value_size // 16))
                    self._step(memory, parts, decay, beta, out)
                self._finish(token, out)

    def _normalise(self, at: Value, scale: float) -> None:
        """To length `scale`."""
        floats_, parts, squares = self.b.floats, self.core.size // 16, Register()
        squares.value = floats(0)
        with loop(i64(0), i64(parts)) as part:
            x = let(load(floats_, at + part * 16))
            squares.value = squares.value + x * x
        factor = let(T.float32(scale) / T.sqrt(total(squares.value) + T.float32(_EPSILON)))
        with loop(i64(0), i64(parts)) as part:
            store(floats_, at + part * 16, load(floats_, at + part * 16) * spread(factor))

    def gates(self, token: Value) -> tuple[Value, Value]:
        """The decay of the state, or the place of its rows' decays; and β."""
        b, heads = self.b, round_up(self.core.heads, 16)
        row = let(inputs_at(b, "steps", self.layer) + token * (2 * heads) + self.head)
        rate, bias = (b.weights.floats[b.layer_at(self.layer, name) + self.head] for name in ("ssm_a", "ssm_dt.bias"))
        decay = let(exp(rate * softplus(b.floats[row + heads] + bias, 1), 1))
        return decay, let(sigmoid(b.floats[row], 1))

    def decay_of(self, row: Value, decay: Value) -> Value:
        """The decay of a row of the state."""
        return decay

    def read(self, found: Value, decay: Value) -> Value:
        """The values that faded keys have read from the state."""
        return spread(decay) * found

    def activate(self, gate: Value) -> Value:
        return silu(gate)

    def _step(self, memory: Value, parts: Sequence[int], decay: Value, beta: Value, out: Value) -> None:
        """Read the state by the key, update it with the new value, and read it by the query, for some vectors of the
        values."""
        b, core, states = self.b, self.core, self.b.states
        found, sums = [Register() for _ in parts], [Register() for _ in parts]
        for each in (*found, *sums):
            each.value = floats(0)
        with loop(i64(0), i64(core.size)) as row:
            key = let(spread(b.floats[self.faded + row]))
            for each, part in zip(found, parts, strict=True):
                each.value = each.value + key * load(states, memory + row * core.value_size + part * 16)
        changes = [
            let(spread(beta) * (load(b.floats, self.value + part * 16) - self.read(each.value, decay)))
            for each, part in zip(found, parts, strict=True)
        ]
        with loop(i64(0), i64(core.size)) as row:
            key, query = let(spread(b.floats[self.key + row])), let(spread(b.floats[self.query + row]))
            fade = let(spread(self.decay_of(row, decay)))
            for each, change, part in zip(sums, changes, parts, strict=True):
                at = let(memory + row * core.value_size + part * 16)
                new = let(load(states, at) * fade + key * change)
                store(states, at, new)
                each.value = each.value + query * new
        for each, part in zip(sums, parts, strict=True):
            store(b.floats, out + part * 16, each.value)

    def _finish(self, token: Value, out: Value) -> None:
        """RMSNorm of the head's output, times SiLU(z)."""
        b, core, squares = self.b, self.core, Register()
        row = let(inputs_at(b, "channels", self.layer) + token * (core.mixed + core.width))
        gate = let(row + core.mixed + self.head * core.value_size)
        norm = let(b.layer_at(self.layer, "ssm_norm"))
        squares.value = floats(0)
        with loop(i64(0), i64(core.value_size // 16)) as part:
            x = let(load(b.floats, out + part * 16))
            squares.value = squares.value + x * x
        mean = total(squares.value) * T.float32(1 / core.value_size)
        scale = let(spread(T.float32(1) / T.sqrt(mean + T.float32(b.shape.norm_eps))))
        with loop(i64(0), i64(core.value_size // 16)) as part:
            x = load(b.floats, out + part * 16) * scale * load(b.weights.floats, norm + part * 16)
            store(b.floats, out + part * 16, x * self.activate(load(b.floats, gate + part * 16)))
