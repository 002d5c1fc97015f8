"""Static graphs of a model, all of whose sizes are fixed, as NPU compilers require.

A `StaticForm` gives the sizes. It has two graphs over the same weights, a chunk of tokens and a step of one token; long
models are split into shards of several layers, and the head may be a separate graph for the host. A chunk with fewer
tokens than the graph is padded in front, so that the newest token is always the last.

Inputs of a shard of n tokens:
  x               float32 [1, n, hidden]: the tokens' embeddings times `residual_factor`, which the host looks up, or
                  the output of the preceding shard
  cos, sin        float32 [1, n, head / 2], of the tokens' positions; for each kind of RoPE, as in `builder.py`
  table_rows      float32 [1, n, layers · size]: the tokens' rows of the table of per-layer embeddings, in models that
                  have one; in the second and later shards with `embedded`, the `x` of the first one
  temperatures    float32 [1, n, 1], for models that have `Network.temperature`
  mask, mask.W    float32 [1, 1, n, rows + n]: 0 for rows and tokens that a token sees, HIDDEN for others; mask.W is for
                  layers with a sliding window of W, whose rows are those of the ring where there is one
  new_key.N, new_value.N  outputs of an earlier shard, where layers read the rows of its layer N
  past_key.N, past_value.N  f32 or f16 [1, KV heads, rows, head]: layer N's rows, their keys rotated, in any order
Outputs:
  key.N, value.N  [1, KV heads, n, head]: the new rows alone, which the host stores in any place. Eviction overwrites
                  rows and rotates pinned ones, on the host: the graph has no state.
  queries         float32 [1, layers of the shard, n, heads · largest head], before RoPE, from which the host computes
                  attention for policies
  y               float32 [1, n, hidden], for the next shard; after the last layer [1, 1, hidden], normalized, for the
                  head
  logits          float32 [1, 1, vocabulary] instead, where the head is in the last shard
"""

from __future__ import annotations

from itertools import pairwise

from edge.backends.onnx.graph.attention.attention import static_attention
from edge.backends.onnx.graph.builder import CORES, Builder
from edge.backends.onnx.graph.context import heads_of_ropes, mask_name, table_names
from edge.backends.onnx.graph.forms import Blocks, Floats
from edge.backends.onnx.graph.layout import Layout, Matrix
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.per_layer_input import make_inputs
from edge.backends.onnx.graph.proto import Attribute, Type
from edge.errors import UnsupportedError
from edge.formats.blocks import BLOCK
from edge.formats.compiled import StaticForm
from edge.model.cores import Attention
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.records import dataclass

_HEADROOM = 1 / 16
HIDDEN = -30000.0  # of masks: far below any score, and float16 holds its sum with one


@dataclass(frozen=True)
class Part:
    """One graph of a form."""

    layers: range  # of the shard
    tokens: int  # of a pass
    last: bool = False


def parts_of(spec: ModelSpec, form: StaticForm, tokens: int) -> list[Part]:
    """The graphs that a pass of `tokens` tokens goes through: one per shard, of nearly equal numbers of layers."""
    ends = [spec.layers * index // form.shards for index in range(form.shards + 1)]
    return [Part(range(first, last), tokens, last == spec.layers) for first, last in pairwise(ends)]


def residual_factor(network: Network) -> float:
    """The factor of the residual stream, embeddings included, that keeps it within float16.

    Larger Gemma models exceed float16. A factor changes nothing if all terms of the stream come from norms and only
    norms read it, except that their epsilon is multiplied by its square.
    """
    return _HEADROOM if all(block.post_norm for layer in network.layers for block in layer) else 1.0


def make_static_graph(
    layout: Layout, spec: ModelSpec, network: Network, form: StaticForm, part: Part, data: str
) -> bytes:
    """Serialize a graph whose weights lie in the file `data` beside it.

    Raises UnsupportedError for weights in a form that NPUs do not multiply.
    """
    return Static(layout, spec, network, form, part, data).build()


def make_context_graph(
    layout: Layout, spec: ModelSpec, network: Network, form: StaticForm, part: Part,
    *, context: str, name: str, compiler: str,
) -> bytes:  # fmt: skip
    """Serialize a graph with the same inputs and outputs whose only node runs graph `name` of a context binary.

    Format: https://onnxruntime.ai/docs/execution-providers/EP-Context-Design.html
    """
    graph = Static(layout, spec, network, form, part, "")
    graph.compose()
    graph.nodes.clear()
    graph.initializers.clear()
    attributes: dict[str, Attribute] = {
        "main_context": 1, "embed_mode": 0, "ep_cache_context": context, "partition_name": name,
        "source": "QNNExecutionProvider", "ep_sdk_version": compiler, "max_size": 0,
    }  # fmt: skip
    graph.emit("EPContext", list(graph.inputs), list(graph.outputs), MS, **attributes)
    return graph.serialized()


def make_embedding_graph(layout: Layout, spec: ModelSpec, network: Network, data: str) -> bytes:
    """Serialize a graph from `tokens` int64 [1, n], with learned positions also `positions` int64 [1, n], to the input
    `x` of the first shard. Any number of tokens; for a host that does not read the matrix itself."""
    graph = Builder(layout, spec, network, "f32", False, data)
    graph.takes_rows = False
    graph.input("tokens", Type.INT64, 1, "n")
    if network.learned_positions:
        graph.input("positions", Type.INT64, 1, "n")
    graph.output("x", Type.FLOAT, 1, "n", spec.hidden)
    graph.node("Mul", graph.embed(), graph.number(residual_factor(network)), output="x")
    return graph.serialized()


class Static(Builder):
    cores, takes_rows = CORES | {Attention: static_attention}, False  # the host puts them into x

    def __init__(
        self, layout: Layout, spec: ModelSpec, network: Network, form: StaticForm, part: Part, data: str
    ) -> None:
        super().__init__(layout, spec, network, form.kv_dtype, True, data, part.tokens)
        self.form, self.at, self.factor = form, part, residual_factor(network)

    def build(self) -> bytes:
        self.compose()
        # In a context, the graphs that share weights are told apart by names that follow from this one.
        return self.serialized(f"edge.{self.at.layers.start}.{self.at.tokens}")

    def compose(self) -> None:
        spec, tokens = self.spec, self.at.tokens
        self.input("x", Type.FLOAT, 1, tokens, spec.hidden)
        heads = heads_of_ropes(self.network)
        for kind in sorted({self.network.rope_of(layer) for layer in self.at.layers if self.network.rotates(layer)}):
            for name in table_names(kind):
                self.input(name, Type.FLOAT, 1, tokens, heads[kind] // 2)
        if size := self.network.layer_inputs:
            embedded = "embedded" if self.at.layers.start else "x"
            self.input(embedded, Type.FLOAT, 1, tokens, spec.hidden)
            self.input("table_rows", Type.FLOAT, 1, tokens, spec.layers * size)
            self.layer_inputs = make_inputs(self, embedded, "table_rows", self.factor)
        if self.network.temperature:
            self.input("temperatures", Type.FLOAT, 1, tokens, 1)
        for window in sorted({self.network.windows[layer] for layer in self.at.layers}):
            self.input(mask_name(window), Type.FLOAT, 1, 1, tokens, self.rows_of(window) + tokens)
        residual, added = self.run(self.at.layers, "x")
        widest = max(core.width for core in self.network.attention if core)
        self.output("queries", Type.FLOAT, 1, len(self.queries), tokens, widest)
        if len(self.queries) > 1:
            self.node("Concat", *self.queries, output="queries", axis=1)
        else:
            self.node("Identity", *self.queries, output="queries")
        if not self.at.last:
            self.output("y", Type.FLOAT, 1, tokens, spec.hidden)
            self.node(*(("Add", residual, added) if added else ("Identity", residual)), output="y")
            return
        self.begin("norm")
        _, x = self.add_and_norm(residual, added, "output_norm")
        self.output("logits", Type.FLOAT, 1, 1, spec.vocab)
        self.head(x)

    def rows_of(self, window: int) -> int:
        return self.form.ring_rows if window and self.kinds.ringed else self.form.rows

    def pick(self, x: str) -> str:
        """Drop all tokens but the newest; called after the last attention."""
        return self.node("Gather", x, self.constant("newest", [self.tokens - 1]), axis=1) if self.tokens > 1 else x

    def add_and_norm(self, residual: str, added: str, name: str, keep: bool = True) -> tuple[str, str]:
        total = self.node("Add", residual, added) if added else residual
        return total, self.norm(total, name, self.factor)

    def post_norm(self, x: str, name: str) -> str:
        return self.scaled(super().post_norm(x, name), self.factor)

    def multiply(self, name: str, x: str, output: str = "") -> str:
        """`Nodes.multiply` in operators that NPUs have: MatMulNBits with whole blocks and a separate bias; MatMul."""
        matrix = self.layout.matrices[name]
        bias = f"{name}.bias" if f"{name}.bias" in self.layout.vectors else ""
        if isinstance(matrix.form, Blocks):
            product = self._whole_blocks(name, matrix, matrix.form, x, "" if bias else output)
        elif isinstance(matrix.form, Floats):
            columns = self.node("Transpose", self.floats(name), perm=[1, 0])  # once, when the model is compiled
            product = self.node("MatMul", x, columns, output="" if bias else output)
        else:
            raise UnsupportedError(
                "NPUs multiply blocks of 4 or 8 bits: convert the model without --method nf4 or w8a8"
            )
        return self.node("Add", product, self.weight(bias), output=output) if bias else product

    def _whole_blocks(self, name: str, matrix: Matrix, form: Blocks, x: str, output: str) -> str:
        columns = matrix.columns + form.means(matrix.columns)
        inputs = [self._means_and_zeros(x, -columns % BLOCK) if form.minima else x]
        inputs += [self.weight(f"{name}.quants"), self.weight(f"{name}.scales")]
        inputs += [self.weight(f"{name}.zeros")] if form.minima else []
        sizes = {"K": columns + -columns % BLOCK, "N": matrix.rows, "bits": form.bits, "block_size": BLOCK}
        return self.node("MatMulNBits", *inputs, domain=MS, output=output, **sizes)

    def _means_and_zeros(self, x: str, zeros: int) -> str:
        """Append the mean of each block of inputs, and zeros that fill the last block."""
        if not zeros:
            return self.with_means(x)
        if ("whole", x) not in self.made:
            ends = self.constant(f"{zeros} columns more", [0, 0, 0, 0, 0, zeros])
            self.made["whole", x] = self.node("Pad", self.with_means(x), ends)
        return self.made["whole", x]
