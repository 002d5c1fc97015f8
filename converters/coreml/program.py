"""The Core ML program of a model: two functions of fixed sizes over the same weights.

`chunk` runs n tokens and `step` runs one, beside a KV cache of C rows that the caller owns. Inputs, float16:
  x             [1, n, hidden]: embeddings of the tokens; a prompt that does not fill the chunk follows padding
  cos, sin      [1, n, head / 2]: RoPE of the tokens' positions; of a model with two kinds of RoPE, cos_1 and sin_1, too
  mask          [1, 1, n, C + n]: 0 for rows that a token sees, else HIDDEN; cached rows first, then the chunk's
  mask_W        [1, 1, n, C + n]: the same for layers with a sliding window of W
  temperatures  [1, n, 1]: factors of the queries, for models that have `Network.temperature`
  past_key_N, past_value_N  [1, KV heads, C, head]: layer N's rows in any order, with rotated keys
Outputs, float16: logits [1, vocabulary] of the last token; key_N and value_N [1, KV heads, n, head], the new rows
alone, which the caller copies into free rows of its cache. The program has no state: eviction is the caller's
bookkeeping.

All of it is computed in float16, as the Neural Engine does. Norms therefore divide by the largest value before they
square, so that nothing overflows.
"""

from __future__ import annotations

from collections.abc import Callable

from coremltools import target
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813
from coremltools.converters.mil.mil import Function, Program, types

from edge.backends.onnx.graph.layout import Layout
from edge.converters.coreml.attention import attention
from edge.converters.coreml.context import ConstantValues, Context, Value, mask_name, scaled, soft_cap, table_names
from edge.converters.coreml.dense import dense
from edge.converters.coreml.sizes import ProgramSizes
from edge.converters.coreml.weights import Constants
from edge.model.cores import Attention, Dense
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

CHUNK, STEP = "chunk", "step"  # names of the functions
CORES: dict[type, Callable[..., Value]] = {Attention: attention, Dense: dense}


def make_program(
    constants: Constants, layout: Layout, spec: ModelSpec, network: Network, sizes: ProgramSizes
) -> Program:
    """Build a program of both functions, which share constants. Raises ModelFormatError for weights beyond float16."""
    weights = ConstantValues(constants, layout)
    program = Program()
    for name, tokens in ((CHUNK, sizes.chunk), (STEP, 1)):
        program.add_function(name, _FunctionBuilder(weights, layout, spec, network, sizes.rows, tokens).build())
    program.default_function_name = STEP
    program.skip_all_passes = program.export_as_multifunction = True
    return program


class _FunctionBuilder(Context):
    """Builds one function: a loop over layers and blocks."""

    def __init__(
        self, weights: ConstantValues, layout: Layout, spec: ModelSpec, network: Network, rows: int, tokens: int
    ) -> None:
        super().__init__(weights, layout, network, rows, tokens)
        self.spec, self.group = spec, spec.heads // spec.kv_heads  # query heads that share a KV head

    def build(self) -> Function:
        with Function(self._inputs(), opset_version=target.iOS18) as function:
            self.inputs = function.inputs
            self.masks = {name: self._grouped(self.inputs[name]) for name in self._masks()}
            self.angles = {name: mb.expand_dims(x=self.inputs[name], axes=[1]) for name in self._tables()}
            x = self.inputs["x"]
            for layer, blocks in enumerate(self.network.layers):
                for block in blocks:
                    x = self.block(layer, block, x)
            function.set_outputs([self.logits(x), *self.kept])
        return function

    def _inputs(self) -> dict[str, Value]:
        spec, n = self.spec, self.tokens
        shapes: dict[str, tuple[int, ...]] = {"x": (1, n, spec.hidden)}
        shapes |= dict.fromkeys(self._tables(), (1, n, spec.head_dim // 2))
        seen = (1, 1, n, self.rows + n)
        shapes |= dict.fromkeys(self._masks(), seen)
        shapes |= {"temperatures": (1, n, 1)} if self.network.temperature else {}
        for layer in range(spec.layers):
            for name in (f"past_key_{layer}", f"past_value_{layer}"):
                shapes[name] = (1, spec.kv_heads, self.rows, spec.head_dim)
        return {name: mb.placeholder(shape, dtype=types.fp16) for name, shape in shapes.items()}

    def _tables(self) -> list[str]:
        kinds = [kind for kind, rope in enumerate(self.network.ropes) if rope.dim]
        return [name for kind in kinds for name in table_names(kind)]

    def _masks(self) -> list[str]:
        return [mask_name(window) for window in sorted(set(self.network.windows))]

    def _grouped(self, mask: Value) -> Value:
        """The mask, repeated for each query head that shares a KV head."""
        return mb.concat(values=[mask] * self.group, axis=2) if self.group > 1 else mask

    def block(self, layer: int, block: Block, residual: Value) -> Value:
        """The residual stream after a block."""
        at, last = f"blk.{layer}.", self.network.last_mixing == (layer, block)
        x = self.norm(residual, at + block.norm, of_residual=True)
        inner = CORES[type(block.core)](self, block.core, layer, x)
        added = self.multiply(at + block.core.output, self.pick(inner) if last else inner)
        if block.post_norm:
            added = self.norm(added, at + block.post_norm, self.factor)
        added = scaled(added, block.scale)
        return mb.add(x=self.pick(residual) if last else residual, y=added)

    def pick(self, x: Value) -> Value:
        """Drop all tokens but the last; called after the last attention."""
        if self.tokens == 1:
            return x
        begin, end = [0, self.tokens - 1, 0], [1, self.tokens, x.shape[-1]]
        return mb.slice_by_index(x=x, begin=begin, end=end)

    def logits(self, x: Value) -> Value:
        final = self.norm(x, "output_norm", of_residual=True)
        logits = scaled(self.multiply(self.network.head, final), self.network.logit_scale)
        return mb.reshape(x=soft_cap(logits, self.network.logit_cap), shape=[1, self.spec.vocab], name="logits")
