"""The core of Kimi Delta Attention: ONNX Runtime's LinearAttention with a decay for each value of a key."""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.recurrent.delta_net import unit
from edge.backends.onnx.graph.state import convolve, remember, reshape, split, steps
from edge.model.cores import KimiDelta


def kimi_delta(graph: Context, core: KimiDelta, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the heads' outputs side by side, [1, n, width]."""
    at, width = f"blk.{layer}.", core.width
    graph.begin("qkv", layer)
    *inputs, beta, alpha, z = (graph.multiply(at + name, x) for name in core.inputs)
    if core.gates:
        alpha, z = (graph.multiply(at + name, each) for name, each in zip(core.gates, (alpha, z), strict=True))
    graph.begin("attend", layer)
    taps = [graph.weight(at + name, (width, 1, core.kernel), "taps") for name in core.convolutions]
    joined = graph.node("Concat", *inputs, axis=-1)
    weights = graph.node("Concat", *taps, axis=0)
    mixed = convolve(graph, layer, joined, "ssm_conv1d", core.mixed, core.kernel, "silu", weights)
    q, k, v = split(graph, mixed, [width] * 3)
    q, k = (unit(graph, each, core.heads, core.size) for each in (q, k))
    rates = graph.weight(f"{at}ssm_a", (core.heads, 1), "rates")
    alpha = graph.node("Add", alpha, graph.weight(f"{at}ssm_dt.bias")) if core.bound else steps(graph, layer, alpha)
    decay = graph.node("Mul", rates, reshape(graph, alpha, 0, 0, core.heads, core.size))
    if core.bound:
        decay = graph.node("Mul", graph.node("Sigmoid", decay), graph.number(core.bound))
    out = remember(
        graph, layer, core.heads, (core.size, core.size), (q, k, v), reshape(graph, decay, 0, 0, -1),
        graph.node("Sigmoid", beta), core.size**-0.5,
    )  # fmt: skip
    normed = graph.norm(reshape(graph, out, 0, 0, core.heads, core.size), f"{at}ssm_norm")
    return graph.node("Mul", reshape(graph, normed, 0, 0, -1), graph.node("Sigmoid", z))
