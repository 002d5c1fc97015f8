"""A feed-forward network: two phases."""

from __future__ import annotations

from edge.backends.tvm.cpu.kernels.functions import ACTIVATIONS
from edge.backends.tvm.cpu.kernels.matmul import Inputs
from edge.backends.tvm.cpu.kernels.vectors import Value, store
from edge.backends.tvm.cpu.phases.builder import PassBuilder, Unit
from edge.backends.tvm.cpu.phases.project import of_normalised, project
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Dense


def gate_up(b: PassBuilder, layer: Value) -> None:
    with of_normalised(b, layer, "gate_up") as inputs:
        _widen(b, layer, inputs)


def down(b: PassBuilder, layer: Value) -> None:
    project(b, layer, "ffn", _width(b), "down")


UNITS: dict[str, Unit] = {"gate_up": gate_up, "down": down}


def _widen(b: PassBuilder, layer: Value, inputs: Inputs) -> None:
    """activation(gate) · up, or activation(up) without a gate."""
    core, width = b.block.core, _width(b)
    assert isinstance(core, Dense)
    activation = ACTIVATIONS[core.activation]
    with b.tiles(-(-core.ffn // 16)) as tile, b.batches() as tokens:
        rows = b.rows(tokens)
        first, *second = (b.product(name, layer, tile, inputs, rows) for name in core.inputs)
        for index, token in enumerate(tokens):
            value = activation(first[index].value)
            for each in second:
                value = value * each[index].value
            value = b.clipped(layer, core.output, "input", value)
            store(b.floats, b.at("ffn") + token * width + tile * 16, value)


def _width(b: PassBuilder) -> int:
    return round_up(b.block.core.width, 32)
