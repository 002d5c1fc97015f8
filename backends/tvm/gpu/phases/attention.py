"""The softmax attention core: two products; between them, new rows are stored and attended to."""

from __future__ import annotations

from edge.backends.tvm.gpu.kernels.attention import attend
from edge.backends.tvm.gpu.kernels.observe import observe
from edge.backends.tvm.gpu.kernels.products import Epilogue
from edge.backends.tvm.gpu.kernels.rows import Heads, store_rows
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.gpu.phases.latent import expand, make_latent_rows
from edge.backends.tvm.kv.memory import RING
from edge.model.cores import Attention
from edge.model.layers import Block

_ROWS = {"keys4": "keys", "values": "values", "row_scales": "row_scales"}  # buffers by the kernels' names


def attention(made: PassBuilder, core: Attention, block: Block, layer: int) -> None:
    if latent := core.latent:
        make_latent_rows(made, core, latent, block, layer)
        _attend(made, core, layer)
        expand(made, core, latent, layer)
        made.multiply_into_hidden("output", layer, block, "edge_output", source="expanded")
        return
    factors = made.factors(core.inputs, layer)
    stride = sum(factor.matrix.rows for factor in factors)
    made.multiply_hidden("qkv", layer, block, "edge_qkv", factors, Epilogue("store", stride), out="qkv")
    _attend(made, core, layer)
    made.multiply_into_hidden("output", layer, block, "edge_output", source="mixed")


def _attend(made: PassBuilder, core: Attention, layer: int) -> None:
    """Attend; for a single token that adds a row, the same kernel stores it."""
    design, tables = made.design, made.design.tables
    form = (core, tables, design.tuning, design.kv_dtype)
    angles, window = tables.angle_row(design.kinds[layer]), design.windows[layer]
    scalars = {"layer": design.rows_of[layer], "angles": angles, "window": window}
    ring = RING if design.has_ring(layer) else ""
    rows = {name: ring + buffer for name, buffer in _ROWS.items()}
    buffers, sinks = weights_in(f"layer.{layer}") | rows, made.layout(layer).vector("attn_sinks")
    tokens, observes = design.chunk, design.observes
    heads = Heads.of(design, core, layer)
    if made.single and not observes and core.rows_of is None and not core.latent:
        made.add(
            "attend", layer, ("edge_attend_step", heads, sinks),
            lambda name: attend(name, *form, tokens=1, heads=heads, sinks=sinks), buffers, scalars,
        )  # fmt: skip
        return
    paid = observes and not ring
    if not core.latent:
        made.add(
            "qkv", layer, ("edge_store_rows", heads, paid),
            lambda name: store_rows(name, heads, tokens=tokens, observes=paid), buffers, scalars,
        )  # fmt: skip
    made.add(
        "attend", layer, ("edge_attend", core, sinks),
        lambda name: attend(name, *form, tokens=tokens, observes=observes, sinks=sinks), buffers, scalars,
    )  # fmt: skip
    if made.observed and layer in design.whole:
        made.add("attend", layer, ("edge_observe", core), lambda name: observe(name, *form), buffers, scalars)
