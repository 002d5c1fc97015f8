"""The Core ML program of a model: two functions of fixed sizes over the same weights.

`chunk` runs n tokens and `step` runs one, beside a KV cache of C rows that the caller owns. Inputs, float16:
  x             [1, n, hidden]: embeddings of the tokens; of a prompt that does not fill the chunk, behind padding
  cos, sin      [1, n, head / 2]: RoPE of the tokens' positions; of a model with two kinds of RoPE, cos_1 and sin_1, too
  mask          [1, 1, n, C + n]: 0 for what a token sees, first cached rows and then the chunk, else HIDDEN
  mask_W        [1, 1, n, C + n]: the same for layers with a sliding window of W
  temperatures  [1, n, 1]: factors of the queries, for models that have `Recipe.temperature`
  past_key_N, past_value_N  [1, KV heads, C, head]: layer N's rows in any order, with rotated keys
Outputs, float16: logits [1, vocabulary] of the last token; key_N and value_N [1, KV heads, n, head], the new rows
alone, which the caller copies into free rows of its cache. The program has no state: eviction is the caller's
bookkeeping.

All of it is computed in float16, as the Neural Engine does. Norms therefore divide by the largest value before they
square, so that nothing overflows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from coremltools import target
from coremltools.converters.mil.mil import Builder as mb  # noqa: N813
from coremltools.converters.mil.mil import Function, Program, types

from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.static import residual_factor
from edge.converters.coreml.sizes import ProgramSizes
from edge.converters.coreml.weights import Constant, Constants
from edge.model.spec import ModelSpec, Recipe

CHUNK, STEP = "chunk", "step"  # names of the functions
_LEAST_DIVISOR = 1e-2  # of a norm: what is smaller has squares far below epsilon · 10^4
_DATA_TYPES = {(4, False): types.int4, (4, True): types.uint4, (8, False): types.int8, (8, True): types.uint8}

Value = Any  # a `Var` of coremltools, which has no types


def make_program(constants: Constants, layout: Layout, spec: ModelSpec, recipe: Recipe, sizes: ProgramSizes) -> Program:
    """A program of both functions, whose constants are shared. Raises ModelFormatError for weights beyond float16."""
    weights = _Weights(constants, layout)
    program = Program()
    for name, tokens in ((CHUNK, sizes.chunk), (STEP, 1)):
        program.add_function(name, _FunctionBuilder(weights, layout, spec, recipe, sizes.rows, tokens).build())
    program.default_function_name = STEP
    program.skip_all_passes = program.export_as_multifunction = True
    return program


class _Weights:
    """Constants as values of the function under construction; the arrays are read once for both."""

    def __init__(self, constants: Constants, layout: Layout) -> None:
        self._constants, self._layout = constants, layout
        self._read: dict[str, Constant] = {}

    def matrix(self, name: str) -> Value:
        constant = self._constant(name)
        if constant.scales is None:
            return _shared(name, constant.data)
        kind = _DATA_TYPES[constant.bits, constant.offsets is not None]
        parts = {
            "data": _shared(f"{name}.data", constant.data.view(types.nptype_from_builtin(kind))),
            "scale": _shared(f"{name}.scale", constant.scales),
        }
        if constant.offsets is not None:
            parts["offset"] = _shared(f"{name}.offset", constant.offsets)
        return mb.constexpr_blockwise_shift_scale(**parts, name=plain(name))

    def vector(self, name: str) -> Value:
        return _shared(name, self._constant(name).data)

    def _constant(self, name: str) -> Constant:
        if name not in self._read:
            is_matrix = name in self._layout.matrices
            self._read[name] = self._constants.matrix(name) if is_matrix else self._constants.vector(name)
        return self._read[name]


class _FunctionBuilder:
    """The parts of a model, one method each."""

    def __init__(
        self, weights: _Weights, layout: Layout, spec: ModelSpec, recipe: Recipe, rows: int, tokens: int
    ) -> None:
        self.weights, self.layout, self.spec, self.recipe = weights, layout, spec, recipe
        self.rows, self.tokens = rows, tokens
        self.factor = residual_factor(layout)
        self.group = spec.heads // spec.kv_heads  # query heads that share a KV head

    def build(self) -> Function:
        with Function(self._inputs(), opset_version=target.iOS18) as function:
            self.inputs = function.inputs
            self.masks = {name: self._grouped(self.inputs[name]) for name in self._masks()}
            self.angles = {name: mb.expand_dims(x=self.inputs[name], axes=[1]) for name in self._tables()}
            x, rows = self.inputs["x"], []
            for layer in range(self.spec.layers):
                x, *new = self.layer(layer, x)
                rows += new
            function.set_outputs([self.logits(x), *rows])
        return function

    def _inputs(self) -> dict[str, Value]:
        spec, n = self.spec, self.tokens
        shapes: dict[str, tuple[int, ...]] = {"x": (1, n, spec.hidden)}
        shapes |= dict.fromkeys(self._tables(), (1, n, spec.head_dim // 2))
        seen = (1, 1, n, self.rows + n)
        shapes |= dict.fromkeys(self._masks(), seen)
        shapes |= {"temperatures": (1, n, 1)} if self.recipe.temperature else {}
        for layer in range(spec.layers):
            for name in (f"past_key_{layer}", f"past_value_{layer}"):
                shapes[name] = (1, spec.kv_heads, self.rows, spec.head_dim)
        return {name: mb.placeholder(shape, dtype=types.fp16) for name, shape in shapes.items()}

    def _tables(self) -> list[str]:
        kinds = [kind for kind, rope in enumerate(self.recipe.ropes) if rope.dim]
        return [name for kind in kinds for name in _table_names(kind)]

    def _masks(self) -> list[str]:
        return [_mask_name(window) for window in sorted(set(self.recipe.windows))]

    def _grouped(self, mask: Value) -> Value:
        """The mask of all queries that share a KV head: group after group, each with all tokens."""
        return mb.concat(values=[mask] * self.group, axis=2) if self.group > 1 else mask

    def layer(self, layer: int, residual: Value) -> tuple[Value, Value, Value]:
        """The residual stream, and the layer's new keys and values."""
        at, by = f"blk.{layer}.", self.recipe.residual_scale
        mixed, keys, values = self.attention(layer, self.norm(residual, f"{at}attn_norm", of_residual=True))
        mixed = self.multiply(f"{at}attn_output", self.pick(layer, mixed))
        mixed = _scaled(self.norm_if_any(mixed, f"{at}post_attention_norm", self.factor), by)
        residual = mb.add(x=self.pick(layer, residual), y=mixed)
        x = self.norm(residual, f"{at}ffn_norm", of_residual=True)
        inner = self.multiply(f"{at}ffn_up", x)
        if self.recipe.gated:
            inner = mb.mul(x=self.activate(self.multiply(f"{at}ffn_gate", x)), y=inner)
        else:
            inner = self.activate(inner)
        down = self.norm_if_any(self.multiply(f"{at}ffn_down", inner), f"{at}post_ffw_norm", self.factor)
        return mb.add(x=residual, y=_scaled(down, by)), keys, values

    def pick(self, layer: int, x: Value) -> Value:
        """Behind the last attention only the last token goes on."""
        if layer < self.spec.layers - 1 or self.tokens == 1:
            return x
        begin, end = [0, self.tokens - 1, 0], [1, self.tokens, x.shape[-1]]
        return mb.slice_by_index(x=x, begin=begin, end=end)

    def logits(self, x: Value) -> Value:
        head, cap = "token_embd" if self.spec.tied_head else "output", self.recipe.logit_cap
        logits = _scaled(self.multiply(head, self.norm(x, "output_norm", of_residual=True)), self.recipe.logit_scale)
        if cap:
            logits = mb.mul(x=mb.tanh(x=mb.real_div(x=logits, y=_half(cap))), y=_half(cap))
        return mb.reshape(x=logits, shape=[1, self.spec.vocab], name="logits")

    def attention(self, layer: int, x: Value) -> tuple[Value, Value, Value]:
        """What the heads mix, [1, n, heads · head], and the new keys and values, [1, KV heads, n, head]."""
        spec, at, n = self.spec, f"blk.{layer}.", self.tokens
        sizes = [spec.heads, spec.kv_heads, spec.kv_heads]
        parts = mb.split(x=self.multiply(f"{at}qkv", x), split_sizes=[size * spec.head_dim for size in sizes], axis=-1)
        q, k, v = (
            mb.reshape(x=part, shape=[1, n, size, spec.head_dim]) for part, size in zip(parts, sizes, strict=True)
        )
        q, k = self.norm_if_any(q, f"{at}attn_q_norm"), self.norm_if_any(k, f"{at}attn_k_norm")
        if self.recipe.temperature:
            q = mb.mul(x=q, y=mb.expand_dims(x=self.inputs["temperatures"], axes=[3]))
        q, k, v = (mb.transpose(x=part, perm=[0, 2, 1, 3]) for part in (q, k, v))
        q, k = self.rotate(layer, _scaled(q, self.recipe.query_scale)), self.rotate(layer, k)
        keys, values = mb.identity(x=k, name=f"key_{layer}"), mb.identity(x=v, name=f"value_{layer}")
        q = mb.reshape(x=q, shape=[1, spec.kv_heads, self.group * n, spec.head_dim])
        # Scores and mixtures are joined rather than the rows, which are many more.
        cached = mb.matmul(x=q, y=self.inputs[f"past_key_{layer}"], transpose_y=True)
        scores = mb.concat(values=[cached, mb.matmul(x=q, y=k, transpose_y=True)], axis=-1)
        if cap := self.recipe.score_cap:
            scores = mb.mul(x=mb.tanh(x=mb.real_div(x=scores, y=_half(cap))), y=_half(cap))
        mask = self.masks[_mask_name(self.recipe.windows[layer])]
        shares = mb.softmax(x=mb.add(x=scores, y=mask), axis=-1)
        of_cached, of_new = mb.split(x=shares, split_sizes=[self.rows, n], axis=-1)
        mixed = mb.matmul(x=of_cached, y=self.inputs[f"past_value_{layer}"])
        mixed = mb.add(x=mixed, y=mb.matmul(x=of_new, y=v))
        mixed = mb.reshape(x=mixed, shape=[1, spec.heads, n, spec.head_dim])
        mixed = mb.transpose(x=mixed, perm=[0, 2, 1, 3])
        return mb.reshape(x=mixed, shape=[1, n, spec.heads * spec.head_dim]), keys, values

    def rotate(self, layer: int, x: Value) -> Value:
        """x [1, heads, n, head], of which value i pairs with value i + head / 2."""
        if not self.recipe.rotates(layer):
            return x
        cos, sin = (self.angles[name] for name in _table_names(self.recipe.rope_of(layer)))
        one, other = mb.split(x=x, num_splits=2, axis=-1)
        first = mb.sub(x=mb.mul(x=one, y=cos), y=mb.mul(x=other, y=sin))
        second = mb.add(x=mb.mul(x=one, y=sin), y=mb.mul(x=other, y=cos))
        return mb.concat(values=[first, second], axis=-1)

    def multiply(self, name: str, x: Value) -> Value:
        bias, rows = f"{name}.bias", self.layout.matrices[name].rows
        has_bias = bias in self.layout.vectors
        # Without one, coremltools would make zeros of its own in each function.
        shift = self.weights.vector(bias) if has_bias else _shared(f"zeros.{rows}", np.zeros(rows, np.float16))
        return mb.linear(x=x, weight=self.weights.matrix(name), bias=shift)

    def activate(self, x: Value) -> Value:
        return mb.gelu(x=x, mode="TANH_APPROXIMATION") if self.recipe.activation == "gelu" else mb.silu(x=x)

    def norm(self, x: Value, name: str, factor: float = 1.0, *, of_residual: bool = False) -> Value:
        """RMS norm, or layer norm, over the last axis: x / m over √(mean((x / m)²) + ε / m²) for m the largest |x|.

        factor: of the result. of_residual: x is the residual stream, which has a factor itself.
        """
        if self.recipe.norm == "layer":
            x = mb.sub(x=x, y=mb.reduce_mean(x=x, axes=[-1], keep_dims=True))
        largest = mb.reduce_max(x=mb.abs(x=x), axes=[-1], keep_dims=True)
        largest = mb.maximum(x=largest, y=_half(_LEAST_DIVISOR))
        small = mb.real_div(x=x, y=largest)
        root_epsilon = self.spec.norm_eps**0.5 * (self.factor if of_residual else 1.0)
        epsilon = mb.square(x=mb.real_div(x=_half(root_epsilon), y=largest))
        mean = mb.reduce_mean(x=mb.square(x=small), axes=[-1], keep_dims=True)
        root = _scaled(mb.sqrt(x=mb.add(x=mean, y=epsilon)), 1 / factor)
        normed = mb.mul(x=mb.real_div(x=small, y=root), y=self.weights.vector(name))
        shift = f"{name}.bias"
        return mb.add(x=normed, y=self.weights.vector(shift)) if shift in self.layout.vectors else normed

    def norm_if_any(self, x: Value, name: str, factor: float = 1.0) -> Value:
        return self.norm(x, name, factor) if name in self.layout.vectors else x


def _table_names(kind: int) -> tuple[str, str]:
    return (f"cos_{kind}", f"sin_{kind}") if kind else ("cos", "sin")


def _mask_name(window: int) -> str:
    return f"mask_{window}" if window else "mask"


def plain(name: str) -> str:
    """Names of values have letters, digits and underscores."""
    return name.replace(".", "_")


def _shared(name: str, values: Any) -> Value:
    """A constant that is stored once, whichever function it is in."""
    constant = mb.const(val=values, name=plain(name))
    constant.op.weight_id = name
    return constant


def _half(value: float) -> Any:
    return np.float16(value)


def _scaled(x: Value, by: float) -> Value:
    return x if by == 1 else mb.mul(x=x, y=_half(by))
