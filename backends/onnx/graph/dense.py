"""The feed-forward core."""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.nodes import MS
from edge.model.cores import Dense


def dense(graph: Context, core: Dense, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the input of ffn_down, [1, n, ffn]."""
    graph.begin("gate-up", layer)
    up = graph.multiply(f"blk.{layer}.ffn_up", x)
    if not core.gated:
        return _activate(graph, core, up)
    return graph.node("Mul", _activate(graph, core, graph.multiply(f"blk.{layer}.ffn_gate", x)), up)


def _activate(graph: Context, core: Dense, x: str) -> str:
    if core.activation in ("gelu", "gelu_erf"):
        return graph.node("Gelu", x, approximate="tanh" if core.activation == "gelu" else "none")
    if core.activation == "relu2":
        positive = graph.node("Relu", x)
        return graph.node("Mul", positive, positive)
    return graph.node("QuickGelu", x, domain=MS, alpha=1.0)  # x · sigmoid(x): SiLU
