"""The graph of an ONNX model, in ONNX Runtime's own operators where they are faster than the standard's.

Inputs, besides `tokens` int64 [1, n]:
  positions   int64 [1, n]: rows of the tables `cos` and `sin` [any, head / 2], by which queries and keys are rotated.
              The caller fills them, so positions may grow for ever and RoPE may be scaled in any way. Layers with a
              window may have tables of their own, `cos.1` and `sin.1`; learned positions have none, and are rows of
              the model's. Layers without RoPE have none, either.
  temperatures float32 [1, n, 1]: factors of the tokens' queries, for models that have `Recipe.temperature`
  wanted      int64 [m]: tokens of which logits are wanted
  past_K.N, past_V.N  [1, KV heads, capacity, head]: layer N's rows; outputs key.N, value.N are to be bound to the same
              memory, and the new rows come behind the `rows` − n first ones. Their order is free.
  last, rows  int32: rows in use with the new ones, less one ([1]); and these ([])
  ring_last, ring_rows  the same of layers that have a ring of rows (edge.backends.ring); their capacity differs, too
  window.N    [1, heads or 1, n, rows]: for layers with a sliding window, 0 for rows that a token sees, −inf for those
              that it does not. (ONNX Runtime's own windows count rows, which lie in any order here.)
  key_scales.N, value_scales.N  float32 [1, KV heads, 1, head], for int8 and int4 rows
  observed    int64 [k]: tokens of which layer N's queries (with their temperatures), keys and values, before RoPE, are
              the output qkv.N
Outputs: logits float32 [1, m, vocabulary], and those.
"""

from __future__ import annotations

from typing import Any

from edge.backends.onnx.graph.layout import Layout
from edge.backends.onnx.graph.nodes import MS, Nodes
from edge.backends.onnx.graph.proto import Type
from edge.backends.ring import LayerKinds
from edge.model.spec import ModelSpec, Recipe

KV_TYPES = {"f32": Type.FLOAT, "f16": Type.FLOAT16, "int8": Type.INT8, "int4": Type.UINT8}
_ROTARY_HEADS = 16  # GroupQueryAttention rotates heads whose size is a multiple of this


def make_graph(layout: Layout, spec: ModelSpec, recipe: Recipe, kv_dtype: str, observed: bool, data: str) -> bytes:
    """A serialized model whose weights lie in the file `data` beside it.

    observed: with `observed` and qkv.N, which int8 and int4 rows always have: their scales are found by them.
    """
    return Builder(layout, spec, recipe, kv_dtype, observed, data).build()


class Builder(Nodes):
    """The parts of a model, one method each; names of values are returned. `static.py` has other parts."""

    def __init__(
        self, layout: Layout, spec: ModelSpec, recipe: Recipe, kv_dtype: str, observed: bool, data: str
    ) -> None:
        super().__init__(layout, data)
        self.spec, self.recipe, self.kv_dtype = spec, recipe, kv_dtype
        self.kinds = LayerKinds.of(recipe.windows)
        self.quantized = kv_dtype in ("int8", "int4")
        self.observed = observed or self.quantized
        self.float_type = Type.FLOAT16 if kv_dtype == "f16" else Type.FLOAT

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
        for kind, rope in enumerate(self.recipe.ropes):
            for name in table_names(kind) if rope.dim else ():
                self.input(name, self.float_type, "angles", spec.head_dim // 2)
        if self.recipe.temperature:
            self.input("temperatures", Type.FLOAT, 1, "n", 1)
        if self.observed:
            self.input("observed", Type.INT64, "k")
        self.output("logits", Type.FLOAT, 1, "m", spec.vocab)
        residual, mixed = self.embed(), ""
        for layer in range(spec.layers):
            residual, mixed = self.layer(layer, residual, mixed)
        self.begin("norm")
        _, x = self.add_and_norm(residual, mixed, "output_norm", keep=False)
        self.head(x)
        return self.serialized()

    def head(self, x: str) -> None:
        self.begin("head")
        head, cap = "token_embd" if self.spec.tied_head else "output", self.recipe.logit_cap
        by = self.recipe.logit_scale
        if not cap and by == 1:
            self.multiply(head, x, "logits")
        elif not cap:
            self.node("Mul", self.multiply(head, x), self.number(by), output="logits")
        else:
            bounded = self.node("Tanh", self.node("Div", self.scaled(self.multiply(head, x), by), self.number(cap)))
            self.node("Mul", bounded, self.number(cap), output="logits")

    def scaled(self, x: str, by: float) -> str:
        return x if by == 1 else self.node("Mul", x, self.number(by))

    def embed(self) -> str:
        self.begin("embed")
        x = self.scaled(self.look_up("token_embd", "tokens"), self.recipe.embedding_scale)
        if self.recipe.learned_positions:
            x = self.node("Add", x, self.node("Gather", self.weight("position_embd"), "positions"))
        return x

    def layer(self, layer: int, residual: str, mixed: str) -> tuple[str, str]:
        """The residual stream before the layer's last addition, and the term to add."""
        at = f"blk.{layer}."
        self.begin("norm", layer)
        residual, x = self.add_and_norm(residual, mixed, f"{at}attn_norm")
        mixed = self.attention(layer, x)
        self.begin("output", layer)
        mixed = self.multiply(f"{at}attn_output", self.pick(layer, mixed))
        self.begin("norm", layer)
        mixed = self.scaled(self.norm_if_any(mixed, f"{at}post_attention_norm"), self.recipe.residual_scale)
        residual, x = self.add_and_norm(self.pick(layer, residual), mixed, f"{at}ffn_norm")
        self.begin("gate-up", layer)
        up = self.multiply(f"{at}ffn_up", x)
        inner = self.node("Mul", self.activate(self.multiply(f"{at}ffn_gate", x)), up) if self.recipe.gated else ""
        inner = inner or self.activate(up)
        self.begin("down", layer)
        down = self.multiply(f"{at}ffn_down", inner)
        self.begin("norm", layer)
        return residual, self.scaled(self.norm_if_any(down, f"{at}post_ffw_norm"), self.recipe.residual_scale)

    def pick(self, layer: int, x: str) -> str:
        """Behind the last attention only wanted tokens go on."""
        return self.node("Gather", x, "wanted", axis=1) if layer == self.spec.layers - 1 else x

    def activate(self, x: str) -> str:
        if self.recipe.activation == "gelu":
            return self.node("Gelu", x, approximate="tanh")
        return self.node("QuickGelu", x, domain=MS, alpha=1.0)  # x · sigmoid(x): SiLU

    def project(self, layer: int, x: str) -> str:
        """Queries, keys and values before RoPE, one behind the other."""
        at = f"blk.{layer}."
        self.begin("qkv", layer)
        qkv = self.multiply(f"{at}qkv", x)
        if f"{at}attn_q_norm" in self.layout.vectors:
            qkv = self.norm_heads(at, qkv)
        if self.recipe.temperature:
            queries, *others = self.split_heads(qkv)
            qkv = self.node("Concat", self.node("Mul", queries, "temperatures"), *others, axis=-1)
        return qkv

    def attention(self, layer: int, x: str) -> str:
        spec, at, qkv = self.spec, f"blk.{layer}.", self.project(layer, x)
        if self.observed:
            width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
            self.output(f"qkv.{layer}", Type.FLOAT, 1, "k", width)
            self.node("Gather", qkv, "observed", output=f"qkv.{layer}", axis=1)
        self.begin("attend", layer)
        if self.kv_dtype == "f16":
            qkv = self.node("Cast", qkv, to=Type.FLOAT16)
        kind, ring = KV_TYPES[self.kv_dtype], "ring_" if layer in self.kinds.ringed else ""
        shape = (1, spec.kv_heads, f"{ring}capacity", spec.head_dim // (2 if self.kv_dtype == "int4" else 1))
        for name in (f"past_key.{layer}", f"past_value.{layer}"):
            self.input(name, kind, *shape)
        for name in (f"key.{layer}", f"value.{layer}"):
            self.output(name, kind, *shape)
        how: dict[str, Any] = {"num_heads": spec.heads, "kv_num_heads": spec.kv_heads, "scale": self.recipe.query_scale}
        tables = ["", "", ""]
        if self.recipe.rotates(layer):
            cos, sin = table_names(self.recipe.rope_of(layer))
            if spec.head_dim % _ROTARY_HEADS:
                self.begin("qkv", layer)
                qkv = self.rotate_heads(qkv, cos, sin)
                self.begin("attend", layer)
            else:
                tables, how["do_rotary"] = [cos, sin, "positions"], 1
        hidden = ""
        if self.recipe.windows[layer]:
            hidden = f"window.{layer}"
            self.input(hidden, self.float_type, 1, f"seeing.{layer}", "n", f"{ring}seen")
        if self.recipe.score_cap:
            how["softcap"] = self.recipe.score_cap
        counts = [f"{ring}last", f"{ring}rows"]
        inputs = [qkv, "", "", f"past_key.{layer}", f"past_value.{layer}", *counts, *tables, hidden, ""]
        if self.quantized:
            for name in (f"key_scales.{layer}", f"value_scales.{layer}"):
                self.input(name, Type.FLOAT, 1, spec.kv_heads, 1, spec.head_dim)
                inputs.append(name)
            how |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
            how["kv_cache_bit_width"] = int(self.kv_dtype.removeprefix("int"))
        mixed = f"{at}mixed"
        self.emit("GroupQueryAttention", inputs, [mixed, f"key.{layer}", f"value.{layer}"], MS, **how)
        return self.node("Cast", mixed, to=Type.FLOAT) if self.kv_dtype == "f16" else mixed

    def split_heads(self, qkv: str) -> list[str]:
        """Queries, keys and values."""
        spec = self.spec
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        parts = [f"{qkv}.{part}" for part in "qkv"]
        self.emit("Split", [qkv, self.constant("qkv_sizes", sizes)], parts, axis=-1)
        return parts

    def norm_heads(self, at: str, qkv: str) -> str:
        """Queries and keys normalised head by head."""
        parts = self.split_heads(qkv)
        for index, name in enumerate(("attn_q_norm", "attn_k_norm")):
            apart = self.node("Reshape", parts[index], self.constant("heads_apart", [0, 0, -1, self.spec.head_dim]))
            parts[index] = self.node("Reshape", self.norm(apart, at + name), self.constant("heads_joined", [0, 0, -1]))
        return self.node("Concat", *parts, axis=-1)

    def rotate_heads(self, qkv: str, cos: str, sin: str) -> str:
        """Rotate queries and keys before the attention, for heads that it does not rotate."""
        parts = self.split_heads(qkv)
        for index, heads in enumerate((self.spec.heads, self.spec.kv_heads)):
            parts[index] = self.node("RotaryEmbedding", parts[index], cos, sin, "positions", num_heads=heads)
        return self.node("Concat", *parts, axis=-1)

    def norm(self, x: str, name: str, input_factor: float = 1.0) -> str:
        """input_factor: what x is multiplied by already, which changes nothing but the epsilon."""
        op = "LayerNormalization" if self.recipe.norm == "layer" else "RMSNormalization"
        return self.node(op, x, *self.scale_and_shift(name), axis=-1, epsilon=self.spec.norm_eps * input_factor**2)

    def norm_if_any(self, x: str, name: str) -> str:
        return self.norm(x, name) if name in self.layout.vectors else x

    def add_and_norm(self, residual: str, added: str, name: str, keep: bool = True) -> tuple[str, str]:
        """The sum, and its norm."""
        if not added:
            return residual, self.norm(residual, name)
        normed, total = f"{name}.out", f"{name}.sum"
        outputs = [normed, "", "", total] if keep else [normed]
        inputs = [residual, added, *self.scale_and_shift(name)]
        op = "SkipLayerNormalization" if self.recipe.norm == "layer" else "SkipSimplifiedLayerNormalization"
        self.emit(op, inputs, outputs, MS, epsilon=self.spec.norm_eps)
        return total, normed

    def scale_and_shift(self, name: str) -> list[str]:
        """A norm's weights, and its bias if it has one."""
        return [self.weight(each) for each in (name, f"{name}.bias") if each in self.layout.vectors]


def table_names(kind: int) -> tuple[str, str]:
    """Cosines and sines of one of a model's kinds of RoPE."""
    return (f"cos.{kind}", f"sin.{kind}") if kind else ("cos", "sin")
