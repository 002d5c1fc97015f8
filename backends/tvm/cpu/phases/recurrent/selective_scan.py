"""Mamba-1 (`edge.model.cores.SelectiveScan`): a product; convolution; products that select; scan by channels; output.

A thread has some tiles of 16 channels, of all tokens: their states move through registers, one for each of the state's
values, with a channel in each lane.
"""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import rms_scale, silu, softplus
from edge.backends.tvm.cpu.kernels.vectors import (
    Register,
    Value,
    exp,
    i64,
    let,
    load,
    loop,
    spread,
    store,
)
from edge.backends.tvm.cpu.phases.adapt import adapt
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import multiply_rows, of_normalised
from edge.backends.tvm.cpu.phases.recurrent.convolution import Convolution
from edge.backends.tvm.cpu.phases.recurrent.states import for_drafts, inputs_at, sequences, state_at
from edge.backends.tvm.packing.cores import round_up, scan_row, state_values
from edge.model.cores import SelectiveScan


def products(b: PassBuilder, layer: Value) -> None:
    """A token's row of `channels` has the inputs of the convolution, then z."""
    channels = _core(b).channels
    with of_normalised(b, layer, "scan_in") as inputs:
        multiply_rows(b, layer, "ssm_in", inputs, channels, inputs_at(b, "channels", layer), channels)


def convolve(b: PassBuilder, layer: Value) -> None:
    core, convolution = _core(b), _convolution(b, layer)
    with (
        b.phase("scan_convolve", layer), b.tiles(core.tiles) as tile, sequences(b) as (begin, stop),
        loop(begin, stop) as token,
    ):  # fmt: skip
        convolution.run(begin, token, let(tile * 16), 16, let(b.at("convolved") + token * core.width + tile * 16))


def select(b: PassBuilder, layer: Value) -> None:
    """A token's row of `steps` has Δ of all channels, then B and C; in a step, each thread has its own B and C."""
    core, row = _core(b), scan_row(_core(b))
    b.quantize_chunk("convolved", core.width, layer, "scan_select")
    with b.phase("scan_select", layer):
        inputs = b.quantized_inputs("convolved", core.width, layer, "scan_select", private=False)
        adapt(b, "scan_select", layer, inputs)
        multiply_rows(b, layer, "ssm_x", inputs, core.selected, b.at("selected"), core.selected)
    if not b.single:
        with b.phase("scan_norms", layer), b.shared_out(b.count) as token:
            _normalise(b, layer, token, token)
    with b.phase("scan_steps", layer):
        if b.single:
            _normalise(b, layer, i64(0), b.thread)
            b.mark("scan_norms", layer)
        inputs = b.inputs("ranked_normed", core.rank)
        adapt(b, "scan_steps", layer, inputs)
        steps = inputs_at(b, "steps", layer)
        with b.tiles(core.tiles) as tile, b.batches() as tokens:
            for token, each in zip(tokens, b.product("ssm_dt", layer, tile, inputs, b.rows(tokens)), strict=True):
                store(b.floats, steps + token * row + tile * 16, softplus(each.value))


def scan(b: PassBuilder, layer: Value) -> None:
    core, convolution = _core(b), _convolution(b, layer)
    with b.phase("selective_scan", layer), b.tiles(core.tiles) as tile, sequences(b) as (begin, stop):
        memory = let(state_at(b, layer, begin) + (core.kernel - 1) * core.width + tile * state_values(core))
        memory = for_drafts(b, memory, state_values(core))
        states = [Register() for _ in range(core.size)]
        for index, each in enumerate(states):
            each.value = load(b.states, memory + index * 16)
        with loop(begin, stop) as token:
            _token(b, layer, tile, convolution, begin, token, states)
        for index, each in enumerate(states):
            store(b.states, memory + index * 16, each.value)
    convolution.apply("selective_scan")


def output(b: PassBuilder, layer: Value) -> None:
    _convolution(b, layer).output("scan_out")


UNITS: dict[str, Unit] = {
    "scan_in": products, "scan_convolve": convolve, "scan_select": select, "selective_scan": scan, "scan_out": output,
}  # fmt: skip


def _core(b: PassBuilder) -> SelectiveScan:
    assert isinstance(b.block.core, SelectiveScan)
    return b.block.core


def _convolution(b: PassBuilder, layer: Value) -> Convolution:
    core = _core(b)
    return Convolution(b, layer, core.width, core.kernel, inputs_at(b, "channels", layer), core.channels)


def _normalise(b: PassBuilder, layer: Value, token: Value, row: Value) -> None:
    """dt of a token to a row of `ranked_normed`, quantized; B and C to one of `steps`."""
    core, first = _core(b), let(b.at("selected") + token * _core(b).selected)
    ranked = let(b.at("ranked_normed") + row * core.rank)
    behind = let(inputs_at(b, "steps", layer) + row * scan_row(core) + core.width - core.rank)
    for name, start, count in core.parts:
        scale = spread(rms_scale(b.floats, first + start, count, count, core.epsilon)) if core.norms else None
        weight = let(b.layer_at(layer, name)) if name in b.names else None
        with loop(i64(0), i64(count // 16)) as part:
            value = load(b.floats, first + start + part * 16)
            value = value if scale is None else value * scale
            value = value if weight is None else value * load(b.weights.floats, weight + part * 16)
            store(b.floats, (behind + start if start else ranked) + part * 16, value)
    b.quantize_row("ranked_normed", core.rank, row, row, b.blocks("scan_steps"))


def _token(
    b: PassBuilder, layer: Value, tile: Value, convolution: Convolution, begin: Value, token: Value,
    states: list[Register],
) -> None:  # fmt: skip
    """Update the states of a tile's channels, and write its gated outputs."""
    core, row = _core(b), scan_row(_core(b))
    steps, channels = inputs_at(b, "steps", layer), inputs_at(b, "channels", layer)
    at, work = let(tile * 16), let(b.at("work") + b.thread * b.at("part_stride"))
    convolution.run(begin, token, at, 16, work)  # again: `convolved` is not kept for drafts
    value, step = let(load(b.floats, work)), let(load(b.floats, steps + token * row + at))
    rates = let(b.layer_at(layer, "ssm_a") // 4 + tile * state_values(core))  # [tiles, size, 16] floats
    selected = let(steps + (b.thread if b.single else token) * row + core.width)
    change, total = let(value * step), Register()
    total.value = load(b.weights.floats, b.layer_at(layer, "ssm_d") + at) * value
    for index, each in enumerate(states):
        decay = exp(load(b.weights.floats, rates + index * 16) * step)
        each.value = each.value * decay + spread(b.floats[selected + index]) * change
        total.value = total.value + spread(b.floats[selected + (core.size + index)]) * each.value
    gate = silu(load(b.floats, channels + token * core.channels + core.width + at))
    store(b.floats, b.at("mixed") + token * round_up(core.width, 32) + at, total.value * gate)
