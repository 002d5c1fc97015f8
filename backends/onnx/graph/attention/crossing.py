"""Attention across: to the states of an encoder, whose keys and values a graph of its own makes once for all tokens.

Input:
  states         float32 [1, s, hidden]
Outputs of that graph, and inputs of the decoder's, by layer:
  cross_key.N, cross_value.N  float32 [1, heads, s, head]
"""

from __future__ import annotations

from edge.backends.onnx.graph.context import Context
from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.proto import Type
from edge.backends.onnx.graph.state import reshape
from edge.model.cores import Attention
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network


def cross_names(layer: int) -> tuple[str, str]:
    return f"cross_key.{layer}", f"cross_value.{layer}"


def attend_across(graph: Context, core: Attention, layer: int, queries: str) -> str:
    """Mix values, [1, n, width]."""
    graph.begin("attend", layer)
    for name in cross_names(layer):
        graph.input(name, Type.FLOAT, 1, core.heads, "states", core.head_dim)
    rows = queries, *cross_names(layer)
    return graph.node("MultiHeadAttention", *rows, domain=MS, num_heads=core.heads, scale=core.scale)


def make_crossing_graph(layout: Layout, spec: ModelSpec, data: str) -> bytes:
    """Serialize the graph of keys and values, whose weights lie in the file `data` beside it."""
    network = find_network(spec)
    graph = Context(layout, spec, network, "f32", False, data)
    graph.input("states", Type.FLOAT, 1, "states", spec.hidden)
    for layer in network.crossings:
        core = network.attention[layer]
        assert core
        graph.begin("cross", layer)
        for name, output in zip(core.crossing, cross_names(layer), strict=True):
            graph.output(output, Type.FLOAT, 1, core.heads, "states", core.head_dim)
            rows = reshape(graph, graph.multiply(f"blk.{layer}.{name}", "states"), 1, -1, core.heads, core.head_dim)
            graph.node("Transpose", rows, perm=[0, 2, 1, 3], output=output)
    return graph.serialized("edge.crossing")
