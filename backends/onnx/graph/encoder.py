"""Graphs of an encoder of pictures or sounds, whose tokens see all of their text: there are no rows to keep.

Inputs:
  x           float32 [texts, n, hidden]: rows before the first layer, of texts of equal length
  cos, sin    float32 [texts, n, head / 2], of the tokens' positions, where the encoder rotates
Output:
  y           float32 [texts, n, hidden], normalized where the encoder has a last norm

For NPUs, all sizes are fixed: one text of n tokens, in the operators of `static.py`. Others have ONNX Runtime's
MultiHeadAttention, which computes no n × n scores.
"""

from __future__ import annotations

from edge.backends.onnx.graph.attention.attention import split_heads, start_attention
from edge.backends.onnx.graph.builder import CORES, Builder
from edge.backends.onnx.graph.context import heads_of_ropes, table_names
from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.proto import Type
from edge.backends.onnx.graph.state import reshape, split
from edge.backends.onnx.graph.static import Static
from edge.model.cores import Attention
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network


def make_encoder_graph(layout: Layout, spec: ModelSpec, data: str, tokens: int = 0) -> bytes:
    """Serialize an encoder whose weights lie in the file `data` beside it. tokens: of a static graph; 0: any number.

    Raises UnsupportedError for weights in a form that NPUs do not multiply.
    """
    graph = _Encoder(layout, spec, data, tokens)
    graph.compose()
    return graph.serialized(f"edge.encoder.{tokens}")


def _attention(graph: _Encoder, core: Attention, layer: int, x: str) -> str:
    """Map normalized rows, [texts, n, hidden], to the concatenated heads' outputs, [texts, n, width]."""
    qkv, _ = start_attention(graph, core, layer, x)
    queries, keys, values = split_heads(graph, core, qkv)
    if graph.network.rotates(layer):
        tables = table_names(graph.network.rope_of(layer))
        queries, keys = (graph.node("RotaryEmbedding", each, *tables, num_heads=core.heads) for each in (queries, keys))
    graph.begin("attend", layer)
    if not graph.tokens:
        rows = queries, keys, values
        return graph.node("MultiHeadAttention", *rows, domain=MS, num_heads=core.heads, scale=core.scale)
    heads = (reshape(graph, each, 1, graph.tokens, core.heads, core.head_dim) for each in (queries, keys, values))
    apart = (graph.node("Transpose", each, perm=[0, 2, 1, 3]) for each in heads)
    mixed = graph.node("Transpose", graph.node("Attention", *apart, scale=core.scale), perm=[0, 2, 1, 3])
    return reshape(graph, mixed, 1, graph.tokens, core.width)


class _Encoder(Static):
    cores = CORES | {Attention: _attention}

    def __init__(self, layout: Layout, spec: ModelSpec, data: str, tokens: int) -> None:
        Builder.__init__(self, layout, spec, find_network(spec), "f32", False, data, tokens)

    def compose(self) -> None:
        sizes = ("texts", "n") if not self.tokens else (1, self.tokens)
        self.input("x", Type.FLOAT, *sizes, self.spec.hidden)
        for kind, head in enumerate(heads_of_ropes(self.network)):
            for name in table_names(kind) if self.network.ropes[kind].dim else ():
                self.input(name, Type.FLOAT, *sizes, head // 2)
        self.output("y", Type.FLOAT, *sizes, self.spec.hidden)
        last = self.node("Add", *self.run(range(self.spec.layers), "x"))
        self.begin("norm")
        self.node("Identity", self.norm(last, "output_norm") if self.network.normed else last, output="y")

    def pick(self, x: str) -> str:
        return x

    def multiply(self, name: str, x: str, output: str = "") -> str:
        parts = self.layout.matrices[name].parts
        names = [part.name for part in parts]
        x = self._bounded(x, f"{names[0]}.input")  # equal for matrices that read the same rows
        product = super().multiply(name, x) if self.tokens else Builder.multiply(self, name, x)
        if f"{names[0]}.output_min" not in self.layout.vectors:
            return product
        own = split(self, product, [part.source.rows for part in parts]) if len(parts) > 1 else [product]
        own = [self._bounded(each, f"{part}.output") for each, part in zip(own, names, strict=True)]
        return self.node("Concat", *own, axis=-1) if len(own) > 1 else own[0]

    def _bounded(self, x: str, name: str) -> str:
        if f"{name}_min" not in self.layout.vectors:
            return x
        return self.node("Min", self.node("Max", x, self.weight(f"{name}_min")), self.weight(f"{name}_max"))
