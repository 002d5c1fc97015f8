"""The core of a gated delta net: ONNX Runtime's LinearAttention."""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.state import convolve, remember, reshape, silu, split, steps
from edge.model.cores import DeltaNet

_EPSILON = 1e-6  # of the lengths of queries and keys


def delta_net(graph: Context, core: DeltaNet, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the heads' outputs side by side, [1, n, width]."""
    at = f"blk.{layer}."
    graph.begin("qkv", layer)
    qkv, gate, beta, alpha = (graph.multiply(at + name, x) for name in core.inputs)
    graph.begin("attend", layer)
    mixed = convolve(graph, layer, qkv, "ssm_conv1d", core.mixed, core.kernel, "silu")
    keys = core.key_heads * core.size
    q, k, v = split(graph, mixed, [keys, keys, core.width])
    q, k = (_for_heads(graph, core, each) for each in (q, k))
    decay = graph.node("Mul", graph.weight(f"{at}ssm_a"), steps(graph, layer, alpha))
    out = remember(
        graph, layer, core.heads, (core.size, core.value_size), (q, k, v), decay, graph.node("Sigmoid", beta),
        core.size**-0.5,
    )  # fmt: skip
    normed = graph.norm(reshape(graph, out, 0, 0, core.heads, core.value_size), f"{at}ssm_norm")
    return graph.node("Mul", reshape(graph, normed, 0, 0, -1), silu(graph, gate))


def _for_heads(graph: Context, core: DeltaNet, x: str) -> str:
    """Normalize queries or keys, and repeat them: head h uses key head h modulo their number."""
    joined = unit(graph, x, core.key_heads, core.size)
    times = core.heads // core.key_heads
    return joined if times == 1 else graph.node("Concat", *[joined] * times, axis=-1)


def unit(graph: Context, x: str, heads: int, size: int) -> str:
    """Normalize queries or keys to length 1."""
    apart = reshape(graph, x, 0, 0, heads, size)
    axis, eps = graph.constant("last_axis", [-1]), graph.number(_EPSILON)
    lengths = graph.node("Sqrt", graph.node("Add", graph.node("ReduceSumSquare", apart, axis, keepdims=1), eps))
    return reshape(graph, graph.node("Div", apart, lengths), 0, 0, -1)
