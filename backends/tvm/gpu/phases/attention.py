"""The softmax attention core: two products; between them, new rows are stored and attended to."""

from __future__ import annotations

from edge.backends.tvm.gpu.kernels.attention import attend
from edge.backends.tvm.gpu.kernels.observe import observe
from edge.backends.tvm.gpu.kernels.products import Epilogue
from edge.backends.tvm.gpu.kernels.rows import Heads, store_rows
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.model.layers import Attention, Block

_KEYS = {"keys4": "keys"}  # a buffer that a kernel reads under another type


def attention(made: PassBuilder, core: Attention, block: Block, layer: int) -> None:
    factors = made.factors(core, layer)
    stride = sum(factor.matrix.rows for factor in factors)
    made.multiply_hidden("qkv", layer, block, "edge_qkv", factors, Epilogue("store", stride), out="qkv")
    _attend(made, core, layer)
    made.multiply_into_hidden("output", layer, block, "edge_output", source="mixed")


def _attend(made: PassBuilder, core: Attention, layer: int) -> None:
    """Attend; for a single token the same kernel stores the row."""
    design, tables = made.design, made.design.tables
    heads, form = Heads.of(design, core, layer), (core, tables, design.tuning, design.kv_dtype)
    scalars = {"layer": layer, "angles": tables.angle_row(design.kinds[layer]), "window": design.windows[layer]}
    buffers = weights_in(f"layer.{layer}") | _KEYS
    tokens, observes, sinks = design.chunk, design.observes, made.layout(layer).vector("attn_sinks")
    if made.single and not observes:
        made.add(
            "attend", layer, ("edge_attend_step", heads, sinks),
            lambda name: attend(name, *form, tokens=1, heads=heads, sinks=sinks), buffers, scalars,
        )  # fmt: skip
        return
    made.add(
        "qkv", layer, ("edge_store_rows", heads),
        lambda name: store_rows(name, heads, tokens=tokens, observes=observes), buffers, scalars,
    )  # fmt: skip
    made.add(
        "attend", layer, ("edge_attend", core, sinks),
        lambda name: attend(name, *form, tokens=tokens, observes=observes, sinks=sinks), buffers, scalars,
    )  # fmt: skip
    if made.observed and layer in design.whole:
        made.add("attend", layer, ("edge_observe", core), lambda name: observe(name, *form), _KEYS, scalars)
