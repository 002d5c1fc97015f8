"""The graph of an ONNX model, in ONNX Runtime's own operators where they are faster than the standard's.

Inputs, besides `tokens` int64 [1, n]:
  positions   int64 [1, n]: rows of the tables `cos` and `sin` [any, head / 2], which rotate queries and keys. The
              caller fills the tables, so positions may grow without limit and RoPE may be scaled in any way. Layers
              with a window may have tables of their own, `cos.1` and `sin.1`, and heads of another size. For learned
              positions these are rows of the model's table; layers without RoPE use none.
  temperatures float32 [1, n, 1]: factors of the tokens' queries, for models that have `Network.temperature`
  wanted      int64 [m]: tokens whose logits are wanted
  given, given_at  float32 [1 + deepstack, g, hidden], int64 [g, 2]: rows in place of embeddings, and what is added to
              them behind the first layers; 0 and the tokens that they stand for. Not in static graphs
  past_K.N, past_V.N  [1, KV heads, capacity, head]: layer N's rows, in any order; bind the outputs key.N, value.N to
              the same memory: new rows are written after the first `rows` − n
  last, rows  int32: rows in use with the new ones, minus one ([1]); and these ([])
  ring_last, ring_rows  the same of layers that have a ring of rows (edge.backends.ring); their capacity differs, too
  window.N    [1, heads or 1, n, rows]: for layers with a sliding window, 0 for rows that a token sees, −inf for
              others. (ONNX Runtime's own windows count rows, but ours are in any order.)
  key_scales.N, value_scales.N  float32 [1, KV heads, 1, head], for int8 and int4 rows
  past_inputs.N, past_memory.N  states of recurrent layers, as in `state.py`, with outputs inputs.N, memory.N
  observed    int64 [k]: tokens of which layer N's queries (with their temperatures), keys and values, before RoPE, are
              the output qkv.N
A layer that reads the rows of an earlier layer M has queries only; it writes M's new rows again, to the same place, so
bind its outputs key.N, value.N to M's memory.
Outputs: logits float32 [1, m, vocabulary], and those above.
"""

from __future__ import annotations

from collections.abc import Callable

from edge.backends.onnx.graph.attention.attention import attention
from edge.backends.onnx.graph.context import Context, heads_of_ropes, table_names
from edge.backends.onnx.graph.dense import dense
from edge.backends.onnx.graph.experts import experts
from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.per_layer_input import make_inputs, per_layer_input
from edge.backends.onnx.graph.proto import Type
from edge.backends.onnx.graph.recurrent.delta_net import delta_net
from edge.backends.onnx.graph.recurrent.kimi_delta import kimi_delta
from edge.backends.onnx.graph.recurrent.mamba import mamba
from edge.backends.onnx.graph.recurrent.selective_scan import selective_scan
from edge.backends.onnx.graph.recurrent.short_convolution import short_convolution
from edge.model.cores import (
    Attention,
    DeltaNet,
    Dense,
    Experts,
    KimiDelta,
    Mamba,
    PerLayerInput,
    SelectiveScan,
    ShortConvolution,
)
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

CORES: dict[type, Callable[..., str]] = {
    Attention: attention,
    DeltaNet: delta_net,
    Dense: dense,
    Experts: experts,
    KimiDelta: kimi_delta,
    Mamba: mamba,
    PerLayerInput: per_layer_input,
    SelectiveScan: selective_scan,
    ShortConvolution: short_convolution,
}


def make_graph(layout: Layout, spec: ModelSpec, network: Network, kv_dtype: str, observed: bool, data: str) -> bytes:
    """Serialize a model whose weights lie in the file `data` beside it.

    observed: with input `observed` and outputs qkv.N; int8 and int4 rows always have them, to calibrate their scales.
    """
    return Builder(layout, spec, network, kv_dtype, observed, data).build()


class Builder(Context):
    """Builds a graph by a loop over layers and blocks; methods return names of values. `static.py` overrides parts."""

    cores = CORES
    takes_rows = True  # in place of embeddings
    normed = ""  # the rows that the last block's core saw

    def build(self) -> bytes:
        spec = self.spec
        self.input("tokens", Type.INT64, 1, "n")
        self.input("positions", Type.INT64, 1, "n")
        self.input("wanted", Type.INT64, "m")
        self.input("last", Type.INT32, 1)
        self.input("rows", Type.INT32)
        if self.kinds.ringed:
            self.input("ring_last", Type.INT32, 1)
            self.input("ring_rows", Type.INT32)
        for kind, head in enumerate(heads_of_ropes(self.network)):
            for name in table_names(kind) if self.network.ropes[kind].dim else ():
                self.input(name, self.float_type, "angles", head // 2)
        if self.network.temperature:
            self.input("temperatures", Type.FLOAT, 1, "n", 1)
        if self.observed:
            self.input("observed", Type.INT64, "k")
        self.input("given", Type.FLOAT, 1 + self.network.deepstack, "g", spec.hidden)
        self.input("given_at", Type.INT64, "g", 2)
        self.output("logits", Type.FLOAT, 1, "m", spec.vocab)
        residual, added = self.run(range(spec.layers), self.embed())
        self.begin("norm")
        _, x = self.add_and_norm(residual, added, "output_norm", keep=False)
        self.head(x)
        return self.serialized()

    def run(self, layers: range, x: str) -> tuple[str, str]:
        """Returns the residual stream before the last addition, and the term to add."""
        residual, added = x, ""
        for layer in layers:
            for block in self.network.layers[layer]:
                residual, added = self.block(layer, block, residual, added)
            if layer < self.network.deepstack and self.takes_rows:
                part, whole = self.given_part(1 + layer), added or residual
                whole = self.node("ScatterND", whole, "given_at", part, reduction="add")
                residual, added = (residual, whole) if added else (whole, "")
        return residual, added

    def given_part(self, number: int) -> str:
        return self.node("Gather", "given", self.constant(f"part {number}", number), axis=0)

    def block(self, layer: int, block: Block, residual: str, added: str) -> tuple[str, str]:
        at, last = f"blk.{layer}.", self.network.last_mixing == (layer, block)
        self.begin("norm", layer)
        beside = added if block.beside else ""  # the term that the previous block adds
        if block.norm and not beside:
            residual, self.normed = self.add_and_norm(residual, added, at + block.norm)
        elif not beside:
            residual = self.normed = self.node("Add", residual, added) if added else residual
        inner = self.cores[type(block.core)](self, block.core, layer, self.normed)
        if isinstance(block.core, Experts):  # which have projected already
            added = inner
        else:
            self.begin("down" if isinstance(block.core, Dense) else "output", layer)
            added = self.multiply(at + block.core.output, self.pick(inner) if last else inner)
        if last and not block.beside and any(each.beside for each in self.network.layers[layer]):
            self.normed = self.pick(self.normed)  # for the block beside this one
        self.begin("norm", layer)
        if block.post_norm:
            added = self.post_norm(added, at + block.post_norm)
        added = self.scaled(added, block.scale)
        if beside:
            added = self.node("Add", self.pick(beside) if last else beside, added)
        residual = self.pick(residual) if last else residual
        if not block.rescale:
            return residual, added
        return self.node("Mul", self.node("Add", residual, added), self.weight(at + block.rescale)), ""

    def head(self, x: str) -> None:
        self.begin("head")
        head, cap = self.network.head, self.network.logit_cap
        by = self.network.logit_scale
        if not cap and by == 1:
            self.multiply(head, x, "logits")
        elif not cap:
            self.node("Mul", self.multiply(head, x), self.number(by), output="logits")
        else:
            bounded = self.node("Tanh", self.node("Div", self.scaled(self.multiply(head, x), by), self.number(cap)))
            self.node("Mul", bounded, self.number(cap), output="logits")

    def embed(self) -> str:
        self.begin("embed")
        x = self.scaled(self.look_up("token_embd", "tokens"), self.network.embedding_scale)
        if self.takes_rows:
            x = self.node("ScatterND", x, "given_at", self.given_part(0))
        if self.network.learned_positions:
            x = self.node("Add", x, self.node("Gather", self.weight("position_embd"), "positions"))
        if self.network.layer_inputs:
            self.layer_inputs = make_inputs(self, x, self.look_up("per_layer_token_embd", "tokens"))
        return x

    def post_norm(self, x: str, name: str) -> str:
        return self.norm(x, name)

    def add_and_norm(self, residual: str, added: str, name: str, keep: bool = True) -> tuple[str, str]:
        """The sum, and its norm."""
        if not added:
            return residual, self.norm(residual, name)
        normed, total = f"{name}.out", f"{name}.sum"
        outputs = [normed, "", "", total] if keep else [normed]
        inputs = [residual, added, *self.scale_and_shift(name)]
        op = "SkipLayerNormalization" if self.network.norm == "layer" else "SkipSimplifiedLayerNormalization"
        self.emit(op, inputs, outputs, MS, epsilon=self.spec.norm_eps)
        return total, normed
