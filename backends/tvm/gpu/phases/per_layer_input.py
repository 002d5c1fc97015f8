"""The vectors that a token has for each layer: all of them before the first layer, then a gate in each."""

from __future__ import annotations

from edge.backends.tvm.gpu.design import input_stride
from edge.backends.tvm.gpu.kernels.layer_inputs import add_projected
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor, Product
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.gpu.program import Slice
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import PerLayerInput
from edge.model.structure.layers import Block


def make_inputs(made: PassBuilder) -> None:
    """Add the projected embeddings to the table's rows, which the engine has written to `layer_inputs`."""
    design, shape = made.design, made.design.shape
    rest, rows = design.weights.rest, shape.layers * shape.layer_inputs
    epilogue = Epilogue("store", rows, shape.hidden**-0.5)
    product = Product("edge_project_inputs", (Factor(rest.matrix("per_layer_model_proj")),), epilogue)
    made.multiply("embed", None, product, {"x": made.hidden, "out": "projected"})
    weight = rest.vector("per_layer_proj_norm")
    assert weight
    made.add(
        "embed", None, ("edge_layer_inputs", weight), lambda name: add_projected(name, shape, weight, design.chunk),
        weights_in("rest") | {"out": "layer_inputs"},
    )  # fmt: skip


def per_layer_input(made: PassBuilder, core: PerLayerInput, block: Block, layer: int) -> None:
    stride, width = input_stride(core.size), round_up(core.size, PART)
    epilogue = Epilogue("activate", width, activation="gelu", inputs=made.design.shape.layers * stride)
    factors, inputs = made.factors(core.inputs, layer), Slice("layer_inputs", 4 * layer * stride)
    made.multiply_hidden("gate-up", layer, block, "edge_input_gate", factors, epilogue, "ffn", inputs)
    made.multiply_into_hidden("down", layer, block, "edge_input_out", source="ffn")
