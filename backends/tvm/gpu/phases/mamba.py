"""The Mamba-2 core: a product, convolution, recurrence, gate, and the output projection."""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.tvm.gpu.kernels.products.products import Epilogue
from edge.backends.tvm.gpu.kernels.recurrent.mamba import Scan, finish, mix, scan
from edge.backends.tvm.gpu.kernels.threads import Built
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.model.cores import Mamba
from edge.model.structure.layers import Block


def mamba(made: PassBuilder, core: Mamba, block: Block, layer: int) -> None:
    design, factors = made.design, made.factors(core.inputs, layer)
    made.multiply_hidden("qkv", layer, block, "edge_mamba_in", factors, Epilogue("store", core.channels), "channels")
    found = Scan.of(core, made.layout(layer), design.shape.norm_eps)
    makers: dict[str, Callable[[str], Built]] = {
        "edge_mamba_mix": lambda name: mix(name, found, design.chunk),
        "edge_mamba_scan": lambda name: scan(name, found),
        "edge_mamba_gate": lambda name: finish(name, found, design.chunk),
    }
    for name, make in makers.items():
        buffers, scalars = weights_in(f"layer.{layer}"), {"state": design.states[layer]}
        made.add("attend", layer, (name, found), make, buffers, scalars)
    made.multiply_into_hidden("output", layer, block, "edge_mamba_out", source="mixed")
