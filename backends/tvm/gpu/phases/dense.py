"""The feed-forward core: two products."""

from __future__ import annotations

from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor
from edge.backends.tvm.gpu.phases.builder import PassBuilder
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Dense
from edge.model.structure.layers import Block


def dense(made: PassBuilder, core: Dense, block: Block, layer: int) -> None:
    factors = tuple(Factor.of(made.layout(layer), name) for name in core.inputs)
    epilogue = Epilogue("activate", round_up(core.width, PART), activation=core.activation)
    made.multiply_hidden("gate-up", layer, block, "edge_gate_up", factors, epilogue, out="ffn")
    made.multiply_into_hidden("down", layer, block, "edge_down", source="ffn")
