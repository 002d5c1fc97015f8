"""Kimi Delta Attention (`edge.model.cores.KimiDelta`): as `delta_net.py`, with products of gates between."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import sigmoid, softplus
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import Value, exp, floats, i64, let, load, loop, quotient, spread, store
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import multiply_rows, of_normalised
from edge.backends.tvm.cpu.phases.recurrent.delta_net import Head, convolution_of
from edge.backends.tvm.cpu.phases.recurrent.states import inputs_at
from edge.backends.tvm.packing.cores import kimi_steps, round_up
from edge.model.cores import KimiDelta


def products(b: PassBuilder, layer: Value) -> None:
    """A token's row of `channels` has the inputs of the convolutions, then z; of `steps` β, padded, then decays."""
    core = _core(b)
    with of_normalised(b, layer, "kimi_in") as inputs:
        channels, heads = inputs_at(b, "channels", layer), round_up(core.heads, 16)
        for index, name in enumerate(core.inputs[:3]):
            multiply_rows(b, layer, name, inputs, core.width, channels + index * core.width, core.mixed + core.width)
        multiply_rows(b, layer, "ssm_beta", inputs, heads, inputs_at(b, "steps", layer), kimi_steps(core))
        if not core.gates:
            _gates(b, layer, inputs, inputs)
            return
        for index, name in enumerate(core.inputs[4:]):
            multiply_rows(b, layer, name, inputs, core.rank, b.at("selected") + index * core.rank, 2 * core.rank)
    b.quantize_chunk("selected", 2 * core.rank, layer, "kimi_gates")
    with b.phase("kimi_gates", layer):
        inputs = b.quantized_inputs("selected", 2 * core.rank, layer, "kimi_gates", private=False)
        _gates(b, layer, inputs, inputs.from_block(i64(core.rank // 32)))


def recur(b: PassBuilder, layer: Value) -> None:
    core = _core(b)
    with b.phase("kimi_delta", layer), b.dealt_out(i64(core.heads)) as head:
        _Head(b, core, layer, head).run()
    convolution_of(b, layer).apply("kimi_delta")


def output(b: PassBuilder, layer: Value) -> None:
    convolution_of(b, layer).output("kimi_out")


UNITS: dict[str, Unit] = {"kimi_in": products, "kimi_delta": recur, "kimi_out": output}


def _core(b: PassBuilder) -> KimiDelta:
    assert isinstance(b.block.core, KimiDelta)
    return b.block.core


def _gates(b: PassBuilder, layer: Value, inputs: Inputs, others: Inputs) -> None:
    """Decays of all values of keys to `steps`, z to `channels`. others: of z."""
    core, adapted = _core(b), not _core(b).gates
    decays, z = core.gates or core.inputs[4:]
    steps = let(inputs_at(b, "steps", layer) + round_up(core.heads, 16))
    with b.tiles(core.width // 16) as tile:
        bias = let(load(b.weights.floats, b.layer_at(layer, "ssm_dt.bias") + tile * 16))
        rate = let(spread(b.weights.floats[b.layer_at(layer, "ssm_a") + quotient(tile, core.size // 16)]))
        with b.batches() as tokens:
            found = b.product(decays, layer, tile, inputs, b.rows(tokens), adapted=adapted)
            for token, each in zip(tokens, found, strict=True):
                alpha = each.value + bias
                decay = floats(core.bound) * sigmoid(rate * alpha) if core.bound else rate * softplus(alpha)
                store(b.floats, steps + token * kimi_steps(core) + tile * 16, exp(decay))
    channels = let(inputs_at(b, "channels", layer) + core.mixed)
    with b.tiles(core.width // 16) as tile, b.batches() as tokens:
        found = b.product(z, layer, tile, others, b.rows(tokens), adapted=adapted)
        for token, each in zip(tokens, found, strict=True):
            store(b.floats, channels + token * (core.mixed + core.width) + tile * 16, each.value)


class _Head(Head):
    """The state is read by keys times decays. `gates` returns the place of its rows' decays."""

    def __init__(self, b: PassBuilder, core: KimiDelta, layer: Value, head: Value) -> None:
        super().__init__(b, core, layer, head)
        self.faded = let(self.value + core.value_size)

    def gates(self, token: Value) -> tuple[Value, Value]:
        b, core = self.b, _core(self.b)
        row = let(inputs_at(b, "steps", self.layer) + token * kimi_steps(core))
        decays = let(row + round_up(core.heads, 16) + self.head * core.size)
        with loop(i64(0), i64(core.size // 16)) as part:
            at = part * 16
            store(b.floats, self.faded + at, load(b.floats, self.key + at) * load(b.floats, decays + at))
        return decays, let(sigmoid(b.floats[row + self.head], 1))

    def decay_of(self, row: Value, decay: Value) -> Value:
        return self.b.floats[decay + row]

    def read(self, found: Value, decay: Value) -> Value:
        return found

    def activate(self, gate: Value) -> Value:
        return sigmoid(gate)
