"""The core of Mamba-2: ONNX Runtime's LinearAttention, with C as queries, B as keys."""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.state import convolve, remember, reshape, rms, silu, split, steps
from edge.model.cores import Mamba


def mamba(graph: Context, core: Mamba, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the gated outputs of all heads, [1, n, width]."""
    at, size = f"blk.{layer}.", core.groups * core.size
    graph.begin("qkv", layer)
    z, inputs, dt = split(graph, graph.multiply(f"{at}ssm_in", x), [core.width, core.mixed, core.heads])
    graph.begin("attend", layer)
    mixed = convolve(graph, layer, inputs, "ssm_conv1d", core.mixed, core.kernel, "silu")
    values, b, c = split(graph, mixed, [core.width, size, size])
    b, c = (_for_heads(graph, core, each) for each in (b, c))
    dt = steps(graph, layer, dt)
    values = reshape(graph, values, 0, 0, core.heads, core.head_dim)
    stepped = reshape(graph, graph.node("Mul", values, reshape(graph, dt, 0, 0, core.heads, 1)), 0, 0, -1)
    decay = graph.node("Mul", graph.weight(f"{at}ssm_a"), dt)
    out = remember(graph, layer, core.heads, (core.size, core.head_dim), (c, b, stepped), decay)
    skipped = graph.node("Mul", values, graph.weight(f"{at}ssm_d", (core.heads, 1), "column"))
    gated = graph.node("Mul", graph.node("Add", out, reshape(graph, skipped, 0, 0, -1)), silu(graph, z))
    if not core.normed:
        return gated
    normed = rms(graph, reshape(graph, gated, 0, 0, core.groups, -1), graph.spec.norm_eps)
    return graph.node("Mul", reshape(graph, normed, 0, 0, -1), graph.weight(f"{at}ssm_norm"))


def _for_heads(graph: Context, core: Mamba, x: str) -> str:
    """Repeat B or C of each group for its heads, which are adjacent."""
    times = core.heads // core.groups
    if times == 1:
        return x
    apart = reshape(graph, x, 0, 0, core.groups, 1, core.size)
    return reshape(graph, graph.node("Concat", *[apart] * times, axis=3), 0, 0, -1)
