"""The softmax attention core: two products; between them, new rows are stored and attended to."""

from __future__ import annotations

from dataclasses import replace

from edge.backends.tvm.gpu.design import CROSS
from edge.backends.tvm.gpu.kernels.attention.attention import attend
from edge.backends.tvm.gpu.kernels.attention.flash_decoding import join
from edge.backends.tvm.gpu.kernels.attention.observe import observe
from edge.backends.tvm.gpu.kernels.attention.rows import Heads, store_rows
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, Product
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.gpu.phases.latent import expand, make_latent_rows
from edge.backends.tvm.kv.memory import RING
from edge.model.cores import Attention
from edge.model.structure.layers import Block

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


def make_cross_rows(made: PassBuilder, core: Attention, layer: int) -> None:
    """Store the keys and values of an encoder's states, rows of `x`, behind those that the layer has."""
    design, own = made.design, replace(core, heads=0, across=False)  # no queries
    factors, heads = made.factors(core.crossing, layer), Heads.of(design, own, layer)
    heads = replace(heads, form=design.row_form(core))
    product = Product("edge_crossing", factors, Epilogue("store", heads.slots * core.head_dim))
    made.multiply("qkv", layer, product, {"x": "x", "out": "qkv"})
    made.add(
        "qkv", layer, ("edge_store_cross_rows", heads),
        lambda name: store_rows(name, heads, tokens=design.chunk, observes=False),
        {name: CROSS + buffer for name, buffer in _ROWS.items()}, {"layer": layer, "angles": 0},
    )  # fmt: skip


def _attend(made: PassBuilder, core: Attention, layer: int) -> None:
    """Attend; for a single token that adds a row, the same kernel stores it. Behind many rows, several workgroups share
    those of a head, and another kernel joins what they leave."""
    design, tables = made.design, made.tables
    form = (core, tables, design.tuning, design.row_form(core).dtype)
    angles, window = tables.angle_row(design.kinds[layer]), design.windows[layer]
    scalars = {"layer": design.rows_of[layer], "angles": angles, "window": window}
    arena = CROSS if core.across else RING if design.has_ring(layer) else ""
    rows = {name: arena + buffer for name, buffer in _ROWS.items()}
    buffers, sinks = weights_in(f"layer.{layer}") | rows, made.layout(layer).vector("attn_sinks")
    splits = design.tuning.row_splits if made.long and layer in design.long_layers and not core.across else 1
    tokens, observes = 1 if splits > 1 else design.chunk, design.observes
    heads = replace(Heads.of(design, core, layer), tables=tables)
    part = "_part" if splits > 1 else ""
    if made.single and not observes and core.makes_rows and not core.latent:
        if made.tokens > 1:  # which may see each other's rows
            made.add(
                "qkv", layer, ("edge_store_rows", heads, "alone"),
                lambda name: store_rows(name, heads, tokens=made.tokens, observes=False, queries=False),
                buffers, scalars,
            )  # fmt: skip
        made.add(
            "attend", layer, (f"edge_attend_step{part}", heads, sinks),
            lambda name: attend(name, *form, tokens=made.tokens, heads=heads, sinks=sinks, splits=splits),
            buffers, scalars,
        )  # fmt: skip
    else:
        paid = observes and not arena
        if not core.latent:
            made.add(
                "qkv", layer, ("edge_store_rows", heads, paid),
                lambda name: store_rows(name, heads, tokens=design.chunk, observes=paid), buffers, scalars,
            )  # fmt: skip
        made.add(
            "attend", layer, (f"edge_attend{part}", core, sinks, tables.alone),
            lambda name: attend(name, *form, tokens=tokens, observes=observes, sinks=sinks, splits=splits),
            buffers, scalars,
        )  # fmt: skip
    if splits > 1:
        made.add(
            "attend", layer, ("edge_join", core),
            lambda name: join(name, *form, observes=observes), buffers, scalars,
        )  # fmt: skip
    if made.observed and layer in design.whole:
        made.add("attend", layer, ("edge_observe", core), lambda name: observe(name, *form), buffers, scalars)
