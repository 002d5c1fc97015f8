"""The core of Kimi Delta Attention: products, convolutions, recurrence, gate, and the output projection."""

from __future__ import annotations

from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Factor, Product
from edge.backends.tvm.gpu.phases.builder import PassBuilder
from edge.backends.tvm.gpu.phases.delta_net import recur_and_project
from edge.model.cores import KimiDelta
from edge.model.structure.layers import Block


def kimi_delta(made: PassBuilder, core: KimiDelta, block: Block, layer: int) -> None:
    """`channels` gets the inputs of the convolutions, z, α and β."""
    layout, width, stored = made.layout(layer), core.width, Epilogue("store", core.channels)
    places = {name: index * width for index, name in enumerate(core.inputs[:3])} | {"ssm_beta": 5 * width}
    gates = dict(zip(core.inputs[4:], (4 * width, 3 * width), strict=True))
    factors = tuple(Factor.of(layout, name, at) for name, at in (places if core.gates else places | gates).items())
    made.multiply_hidden("qkv", layer, block, "edge_kimi_in", factors, stored, "channels")
    for behind, (name, at) in zip(core.gates, gates.items(), strict=False):
        inner = Epilogue("store", core.rank)
        made.multiply_hidden("qkv", layer, block, "edge_kimi_low", (Factor.of(layout, name),), inner, "latents")
        product = Product("edge_kimi_gate", (Factor.of(layout, behind, at),), stored)
        made.multiply("qkv", layer, product, {"x": "latents", "out": "channels"})
    recur_and_project(made, core, block, layer, "kimi")
