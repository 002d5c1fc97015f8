"""The core of a gated causal convolution."""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.state import convolve, split
from edge.model.cores import ShortConvolution


def short_convolution(graph: Context, core: ShortConvolution, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the input of the output projection, [1, n, hidden]."""
    graph.begin("qkv", layer)
    b, c, z = split(graph, graph.multiply(f"blk.{layer}.{core.inputs[0]}", x), [core.hidden] * 3)
    graph.begin("attend", layer)
    mixed = convolve(graph, layer, graph.node("Mul", b, z), "shortconv.conv", core.hidden, core.kernel, "none")
    return graph.node("Mul", c, mixed)
