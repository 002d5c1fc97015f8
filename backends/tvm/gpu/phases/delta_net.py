"""The gated delta net core: products, convolution, recurrence, norm, and the output projection."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.tvm.gpu.kernels.delta_net import Recurrence, finish, mix, recur
from edge.backends.tvm.gpu.kernels.products import Epilogue
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.model.cores import DeltaNet
from edge.model.layers import Block


def delta_net(made: PassBuilder, core: DeltaNet, block: Block, layer: int) -> None:
    design, epilogue = made.design, Epilogue("store", core.channels)
    made.multiply_hidden(
        "qkv", layer, block, "edge_delta_in", made.factors(core.inputs, layer), epilogue, out="channels"
    )
    found = Recurrence.of(core, made.layout(layer), design.shape.norm_eps)
    makers: dict[str, Callable[[str], Built]] = {
        "edge_delta_mix": lambda name: mix(name, found, design.chunk),
        "edge_delta_net": lambda name: recur(name, found),
        "edge_delta_norm": lambda name: finish(name, found, design.chunk),
    }
    for name, make in makers.items():
        buffers, scalars = weights_in(f"layer.{layer}"), {"state": design.states[layer]}
        made.add("attend", layer, (name, found), make, buffers, scalars)
    made.multiply_into_hidden("output", layer, block, "edge_delta_out", source="mixed")
