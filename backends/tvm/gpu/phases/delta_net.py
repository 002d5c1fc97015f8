"""The gated delta net core: products, convolution, recurrence, norm, and the output projection."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.tvm.gpu.kernels.products.products import Epilogue
from edge.backends.tvm.gpu.kernels.recurrent.delta_net import Recurrence, finish, mix, recur
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.model.cores import DeltaNet, KimiDelta
from edge.model.structure.layers import Block


def delta_net(made: PassBuilder, core: DeltaNet, block: Block, layer: int) -> None:
    epilogue = Epilogue("store", core.channels)
    made.multiply_hidden(
        "qkv", layer, block, "edge_delta_in", made.factors(core.inputs, layer), epilogue, out="channels"
    )
    recur_and_project(made, core, block, layer, "delta")


def recur_and_project(made: PassBuilder, core: DeltaNet | KimiDelta, block: Block, layer: int, kind: str) -> None:
    """From `channels` to the hidden states. kind: in the names of kernels."""
    design = made.design
    found = Recurrence.of(core, made.layout(layer), design.shape.norm_eps)
    makers: dict[str, Callable[[str], Built]] = {
        f"edge_{kind}_mix": lambda name: mix(name, found, design.chunk),
        f"edge_{kind}_net": lambda name: recur(name, found),
        f"edge_{kind}_norm": lambda name: finish(name, found, design.chunk),
    }
    for name, make in makers.items():
        buffers, scalars = weights_in(f"layer.{layer}"), {"state": design.states[layer]}
        made.add("attend", layer, (name, found), make, buffers, scalars)
    made.multiply_into_hidden("output", layer, block, f"edge_{kind}_out", source="mixed")
