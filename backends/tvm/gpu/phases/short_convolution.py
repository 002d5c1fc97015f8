"""The gated causal convolution core: a product, the convolution, and the output projection."""

from __future__ import annotations

from edge.backends.tvm.gpu.kernels.products.products import Epilogue
from edge.backends.tvm.gpu.kernels.recurrent.convolve import convolve
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.model.cores import ShortConvolution
from edge.model.structure.layers import Block


def short_convolution(made: PassBuilder, core: ShortConvolution, block: Block, layer: int) -> None:
    factors, taps = made.factors(core.inputs, layer), made.layout(layer).vector("shortconv.conv")
    assert taps
    made.multiply_hidden("qkv", layer, block, "edge_conv_in", factors, Epilogue("store", core.channels), out="channels")
    made.add(
        "attend", layer, ("edge_convolve", core, taps), lambda name: convolve(name, core, taps),
        weights_in(f"layer.{layer}"), {"state": made.design.states[layer]},
    )  # fmt: skip
    made.multiply_into_hidden("output", layer, block, "edge_conv_out", source="mixed")
