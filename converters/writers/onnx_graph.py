"""The graph of an ONNX model: what is computed, in ONNX Runtime's own operators where they are faster.

Inputs, besides `tokens` int64 [1, n]:
  positions   int64 [1, n]: rows of the tables `cos` and `sin` [any, head / 2], by which queries and keys are turned.
              The caller fills them, so positions may grow for ever and RoPE may be scaled in any way.
  wanted      int64 [m]: tokens of which logits are wanted
  past_K.N, past_V.N  [1, KV heads, capacity, head]: layer N's rows; outputs key.N, value.N are to be bound to the same
              memory, and the new rows come behind the `rows` − n first ones. Their order is free.
  last, rows  int32: rows in use with the new ones, less one ([1]); and these ([])
  key_scales.N, value_scales.N  float32 [1, KV heads, 1, head], for int8 and int4 rows
  observed    int64 [k]: tokens of which layer N's queries, keys and values, before RoPE, are the output qkv.N
Outputs: logits float32 [1, m, vocabulary], and those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge.converters.writers.onnx_layout import Layout, Matrix
from edge.spec import ModelSpec, Recipe

OPSET, IR_VERSION = 23, 11
MS = "com.microsoft"
KV_TYPES = {"f32": "FLOAT", "f16": "FLOAT16", "int8": "INT8", "int4": "UINT8"}
_BLOCK = 32
_INT8_ACTIVATIONS = 4  # MatMulNBits' accuracy_level: six times faster than float activations


def make_graph(layout: Layout, spec: ModelSpec, recipe: Recipe, kv_dtype: str, observed: bool, data: str) -> bytes:
    """A serialized model whose weights lie in the file `data` beside it.

    observed: with `observed` and qkv.N, which int8 and int4 rows always have: their scales are found by them.
    """
    return _Builder(layout, spec, recipe, kv_dtype, observed, data).build()


class _Builder:
    def __init__(
        self, layout: Layout, spec: ModelSpec, recipe: Recipe, kv_dtype: str, observed: bool, data: str
    ) -> None:
        import onnx

        self.onnx, self.types, self.helper = onnx, onnx.TensorProto, onnx.helper
        self.layout, self.spec, self.recipe = layout, spec, recipe
        self.kv_dtype, self.data = kv_dtype, data
        self.quantized = kv_dtype in ("int8", "int4")
        self.observed = observed or self.quantized
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.initializers: dict[str, Any] = {}
        self.means: dict[str, str] = {}

    def build(self) -> bytes:
        spec, types = self.spec, self.types
        self.input("tokens", types.INT64, 1, "n")
        self.input("positions", types.INT64, 1, "n")
        self.input("wanted", types.INT64, "m")
        self.input("last", types.INT32, 1)
        self.input("rows", types.INT32)
        float_type = types.FLOAT16 if self.kv_dtype == "f16" else types.FLOAT
        for name in ("cos", "sin"):
            self.input(name, float_type, "angles", spec.head_dim // 2)
        if self.observed:
            self.input("observed", types.INT64, "k")
        self.output("logits", types.FLOAT, 1, "m", spec.vocab)
        residual, mixed = self.embed(), ""
        for layer in range(spec.layers):
            residual, mixed = self.layer(layer, residual, mixed)
        _, x = self.add_and_norm(residual, mixed, "output_norm", keep=False)
        self.multiply("token_embd" if spec.tied_head else "output", x, "logits")
        graph = self.helper.make_graph(self.nodes, "edge", self.inputs, self.outputs, list(self.initializers.values()))
        opsets = [self.helper.make_opsetid("", OPSET), self.helper.make_opsetid(MS, 1)]
        model = self.helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="edge")
        return bytes(model.SerializeToString())

    # The parts of a model

    def embed(self) -> str:
        matrix, name = self.layout.matrices["token_embd"], "token_embd"
        if matrix.bits == 32:
            return self.node("Gather", self.weight(f"{name}.floats"), "tokens")
        quants = self.weight(f"{name}.quants", (matrix.rows, matrix.columns * matrix.bits // 8), "rows")
        how: dict[str, Any] = {"bits": matrix.bits, "block_size": _BLOCK, "gather_axis": 0, "quantize_axis": 1}
        return self.node("GatherBlockQuantized", quants, "tokens", self.weight(f"{name}.scales"), domain=MS, **how)

    def layer(self, layer: int, residual: str, mixed: str) -> tuple[str, str]:
        """The residual stream without the layer's last addition, and what is to be added."""
        at = f"blk.{layer}."
        residual, x = self.add_and_norm(residual, mixed, f"{at}attn_norm")
        mixed = self.multiply(f"{at}attn_output", self.pick(layer, self.attention(layer, x)))
        residual, x = self.add_and_norm(self.pick(layer, residual), mixed, f"{at}ffn_norm")
        gate, up = self.multiply(f"{at}ffn_gate", x), self.multiply(f"{at}ffn_up", x)
        inner = self.node("Mul", self.node("QuickGelu", gate, domain=MS, alpha=1.0), up)  # x · sigmoid(x): SiLU
        return residual, self.multiply(f"{at}ffn_down", inner)

    def pick(self, layer: int, x: str) -> str:
        """Behind the last attention only wanted tokens go on."""
        return self.node("Gather", x, "wanted", axis=1) if layer == self.spec.layers - 1 else x

    def attention(self, layer: int, x: str) -> str:
        spec, types, at = self.spec, self.types, f"blk.{layer}."
        qkv = self.multiply(f"{at}qkv", x)
        if f"{at}attn_q_norm" in self.layout.vectors:
            qkv = self.norm_heads(at, qkv)
        if self.observed:
            width = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
            self.output(f"qkv.{layer}", types.FLOAT, 1, "k", width)
            self.node("Gather", qkv, "observed", output=f"qkv.{layer}", axis=1)
        if self.kv_dtype == "f16":
            qkv = self.node("Cast", qkv, to=types.FLOAT16)
        kind = getattr(types, KV_TYPES[self.kv_dtype])
        shape = (1, spec.kv_heads, "capacity", spec.head_dim // (2 if self.kv_dtype == "int4" else 1))
        for name in (f"past_key.{layer}", f"past_value.{layer}"):
            self.input(name, kind, *shape)
        for name in (f"key.{layer}", f"value.{layer}"):
            self.output(name, kind, *shape)
        inputs = [qkv, "", "", f"past_key.{layer}", f"past_value.{layer}", "last", "rows"]
        inputs += ["cos", "sin", "positions"]
        how: dict[str, Any] = {"num_heads": spec.heads, "kv_num_heads": spec.kv_heads, "do_rotary": 1}
        if self.quantized:
            for name in (f"key_scales.{layer}", f"value_scales.{layer}"):
                self.input(name, types.FLOAT, 1, spec.kv_heads, 1, spec.head_dim)
            inputs += ["", "", f"key_scales.{layer}", f"value_scales.{layer}"]
            how |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
            how |= {"kv_cache_bit_width": int(self.kv_dtype.removeprefix("int"))}
        mixed, scale = f"{at}mixed", self.recipe.query_scale
        self.emit("GroupQueryAttention", inputs, [mixed, f"key.{layer}", f"value.{layer}"], MS, scale=scale, **how)
        return self.node("Cast", mixed, to=types.FLOAT) if self.kv_dtype == "f16" else mixed

    def norm_heads(self, at: str, qkv: str) -> str:
        """Queries and keys normalised head by head."""
        spec = self.spec
        sizes = [spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim]
        parts = [f"{at}q", f"{at}k", f"{at}v"]
        self.emit("Split", [qkv, self.constant("qkv_sizes", sizes)], parts, axis=-1)
        for index, name in enumerate(("attn_q_norm", "attn_k_norm")):
            shape = self.constant("heads_apart", [0, 0, -1, spec.head_dim])
            apart = self.node("Reshape", parts[index], shape)
            normed = self.norm(apart, at + name)
            parts[index] = self.node("Reshape", normed, self.constant("heads_joined", [0, 0, -1]))
        return self.node("Concat", *parts, axis=-1)

    def norm(self, x: str, name: str) -> str:
        return self.node("RMSNormalization", x, self.weight(name), axis=-1, epsilon=self.spec.norm_eps)

    def add_and_norm(self, residual: str, added: str, name: str, keep: bool = True) -> tuple[str, str]:
        """The sum, and its norm."""
        if not added:
            return residual, self.norm(residual, name)
        normed, total = f"{name}.out", f"{name}.sum"
        outputs = [normed, "", "", total] if keep else [normed]
        inputs = [residual, added, self.weight(name)]
        self.emit("SkipSimplifiedLayerNormalization", inputs, outputs, MS, epsilon=self.spec.norm_eps)
        return total, normed

    def multiply(self, name: str, x: str, output: str = "") -> str:
        matrix: Matrix = self.layout.matrices[name]
        bias = f"{name}.bias" if f"{name}.bias" in self.layout.vectors else ""
        if matrix.bits == 32:
            product = self.node(
                "FusedMatMul", x, self.weight(f"{name}.floats"), domain=MS, transB=1, output="" if bias else output
            )
            return self.node("Add", product, self.weight(bias), output=output) if bias else product
        inputs = [self.with_means(x) if matrix.means else x]
        inputs += [self.weight(f"{name}.quants"), self.weight(f"{name}.scales")]
        if matrix.minima or bias:
            inputs.append(self.weight(f"{name}.zeros") if matrix.minima else "")
        if bias:
            inputs += ["", self.weight(bias)]
        sizes: dict[str, Any] = {
            "K": matrix.columns + matrix.means,
            "N": matrix.rows,
            "bits": matrix.bits,
            "block_size": _BLOCK,
        }
        how = {**sizes, "accuracy_level": _INT8_ACTIVATIONS}
        return self.node("MatMulNBits", *inputs, domain=MS, output=output, **how)

    def with_means(self, x: str) -> str:
        """Behind the inputs, the mean of each block of them."""
        if x not in self.means:
            means = self.node("AveragePool", x, kernel_shape=[_BLOCK], strides=[_BLOCK])
            self.means[x] = self.node("Concat", x, means, axis=-1)
        return self.means[x]

    # The parts of a graph

    def node(self, op: str, *inputs: str, domain: str = "", output: str = "", **attributes: Any) -> str:
        output = output or f"{op}.{len(self.nodes)}"
        self.emit(op, inputs, [output], domain, **attributes)
        return output

    def emit(self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attributes: Any) -> None:
        self.nodes.append(self.helper.make_node(op, list(inputs), list(outputs), domain=domain, **attributes))

    def input(self, name: str, kind: int, *shape: int | str) -> None:
        self.inputs.append(self.helper.make_tensor_value_info(name, kind, shape))

    def output(self, name: str, kind: int, *shape: int | str) -> None:
        self.outputs.append(self.helper.make_tensor_value_info(name, kind, shape))

    def constant(self, name: str, values: list[int]) -> str:
        self.initializers[name] = self.helper.make_tensor(name, self.types.INT64, [len(values)], values)
        return name

    def weight(self, name: str, shape: tuple[int, ...] = (), seen_as: str = "") -> str:
        """An array of the data file; the same bytes in another shape under a name of its own."""
        place = self.layout.places[name]
        known = f"{name}.{seen_as}" if seen_as else name
        if known not in self.initializers:
            tensor = self.types(name=known, dims=shape or place.shape)
            tensor.data_type = self.types.FLOAT if place.dtype == "float32" else self.types.UINT8
            tensor.data_location = self.types.EXTERNAL
            where = {"location": self.data, "offset": str(place.offset), "length": str(place.nbytes)}
            for key, value in where.items():
                tensor.external_data.add(key=key, value=value)
            self.initializers[known] = tensor
        return known
