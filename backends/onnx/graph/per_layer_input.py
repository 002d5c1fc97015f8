"""The vectors that a token has for each layer; the formulas stand at `PerLayerInput`."""

from __future__ import annotations

import math

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.state import reshape, split
from edge.model.cores import PerLayerInput


def make_inputs(graph: Context, x: str, rows: str, factor: float = 1.0) -> list[str]:
    """The vectors of each layer, [1, n, size], from the embeddings before the first layer, [1, n, hidden], times a
    factor, and the tokens' rows of the table, [1, n, layers · size]."""
    size, layers = graph.network.layer_inputs, len(graph.network.layers)
    projected = graph.scaled(graph.multiply("per_layer_model_proj", x), 1 / (factor * math.sqrt(graph.spec.hidden)))
    normed = graph.norm(reshape(graph, projected, 0, 0, layers, size), "per_layer_proj_norm")
    looked_up = graph.scaled(rows, math.sqrt(size))
    total = graph.node("Add", looked_up, reshape(graph, normed, 0, 0, layers * size))
    return split(graph, graph.scaled(total, math.sqrt(0.5)), [size] * layers)


def per_layer_input(graph: Context, core: PerLayerInput, layer: int, x: str) -> str:
    """From hidden states, [1, n, hidden], to the input of the output projection, [1, n, size]."""
    graph.begin("gate-up", layer)
    gate = graph.multiply(f"blk.{layer}.{core.inputs[0]}", graph.scaled(x, 1 / graph.factor))
    gate = graph.node("Gelu", gate, approximate="tanh")
    inputs = graph.layer_inputs[layer]
    return graph.node("Mul", gate, graph.pick(inputs) if layer == graph.network.last_mixing[0] else inputs)
