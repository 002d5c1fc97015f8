"""A gated causal convolution (`edge.model.cores.ShortConvolution`): product; convolution by channels; output."""

from __future__ import annotations

import itertools

from edge.backends.tvm.cpu.kernels.vectors import Register, Value, floats, let, load, loop, store
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import multiply_rows, of_normalised, project
from edge.backends.tvm.cpu.phases.recurrent.states import inputs_at, sequences, state_at, unless_verified
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import ShortConvolution


def products(b: PassBuilder, layer: Value) -> None:
    """A token's row of `channels` has B, C and z."""
    core = _core(b)
    with of_normalised(b, layer, "conv_in") as inputs:
        channels = inputs_at(b, "channels", layer)
        multiply_rows(b, layer, "shortconv.in_proj", inputs, core.channels, channels, core.channels)


def convolve(b: PassBuilder, layer: Value) -> None:
    """A thread has some channels, of all tokens: their last inputs move through registers."""
    core, width = _core(b), round_up(_core(b).width, 32)
    with b.phase("convolve", layer), b.tiles(core.hidden // 16) as tile:
        weights = let(b.layer_at(layer, "shortconv.conv") // 4 + tile * (16 * core.kernel))  # [tiles, kernel, 16]
        taps = [let(load(b.weights.floats, weights + tap * 16)) for tap in range(core.kernel)]
        past, channels = [Register() for _ in range(core.kernel - 1)], inputs_at(b, "channels", layer)
        with sequences(b) as (first, stop):
            state = let(state_at(b, layer, first) + tile * 16)
            for row, each in enumerate(past):
                each.value = load(b.states, state + row * core.hidden)
            with loop(first, stop) as token:
                at = let(channels + token * (3 * core.hidden) + tile * 16)
                new = let(load(b.floats, at) * load(b.floats, at + 2 * core.hidden))
                total: Value = floats(0)
                for tap, each in zip(taps, past, strict=False):
                    total = total + tap * each.value
                mixed = let((total + taps[-1] * new) * load(b.floats, at + core.hidden))
                store(b.floats, b.at("mixed") + token * width + tile * 16, mixed)
                for each, after in itertools.pairwise(past):
                    each.value = after.value
                past[-1].value = new
            with unless_verified(b):
                for row, each in enumerate(past):
                    store(b.states, state + row * core.hidden, each.value)


def output(b: PassBuilder, layer: Value) -> None:
    project(b, layer, "mixed", round_up(_core(b).width, 32), "conv_out")


UNITS: dict[str, Unit] = {"conv_in": products, "convolve": convolve, "conv_out": output}


def _core(b: PassBuilder) -> ShortConvolution:
    assert isinstance(b.block.core, ShortConvolution)
    return b.block.core
