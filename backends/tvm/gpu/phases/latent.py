"""Multi-head latent attention: what stands around attention, which is that of a single KV head."""

from __future__ import annotations

from dataclasses import replace

from edge.backends.tvm.gpu.kernels.attention.latent import LatentRows, gate_heads, rotate_queries, store_latent
from edge.backends.tvm.gpu.kernels.products.products import Epilogue, PerHead, Product
from edge.backends.tvm.gpu.phases.builder import PassBuilder, weights_in
from edge.backends.tvm.packing.blocks import PART
from edge.backends.tvm.packing.cores import round_up
from edge.model.cores import Attention, Latent
from edge.model.structure.layers import Block


def make_latent_rows(made: PassBuilder, core: Attention, latent: Latent, block: Block, layer: int) -> None:
    """Queries to `qkv`, rows to the cache."""
    rows, row = replace(LatentRows.of(made.design, core, layer), tables=made.tables), core.row
    stride = core.heads * core.query
    names = core.inputs if latent.rank else core.inputs[1:]
    if not latent.rank:
        factors = made.factors(("attn_q",), layer)
        made.multiply_hidden("qkv", layer, block, "edge_queries", factors, Epilogue("store", stride), out="queries")
    ends = Epilogue("store", rows.stride)
    made.multiply_hidden("qkv", layer, block, "edge_latents", made.factors(names, layer), ends, out="latents")
    design = made.design
    scalars = {"layer": design.rows_of[layer], "angles": design.tables.angle_row(design.kinds[layer])}
    made.add(
        "qkv", layer, ("edge_store_latent", rows, design.observes),
        lambda name: store_latent(name, rows, tokens=design.chunk, observes=design.observes),
        weights_in(f"layer.{layer}") | {"keys4": "keys"}, scalars,
    )  # fmt: skip
    if latent.rank:
        product = Product("edge_queries", made.factors(("attn_q_b",), layer), Epilogue("store", stride))
        made.multiply("qkv", layer, product, {"x": "ranked", "out": "queries"})
    made.add(
        "qkv", layer, ("edge_rotate_queries", rows),
        lambda name: rotate_queries(name, rows, tokens=design.chunk), {}, scalars,
    )  # fmt: skip
    absorbed = PerHead(row.value, core.query, row.key)
    epilogue = Epilogue("store", core.heads * row.key, core.scale)
    product = Product("edge_absorb", made.factors(("attn_k_b",), layer), epilogue, per_head=absorbed)
    made.multiply("qkv", layer, product, {"x": "queries", "out": "qkv"})


def expand(made: PassBuilder, core: Attention, latent: Latent, layer: int) -> None:
    """`attn_v_b` of each head times what it has mixed, into `expanded`."""
    heads = PerHead(latent.value, core.row.value, latent.value)
    epilogue = Epilogue("store", round_up(core.width, PART))
    product = Product("edge_expand", made.factors(("attn_v_b",), layer), epilogue, per_head=heads)
    made.multiply("output", layer, product, {"x": "mixed", "out": "expanded"})
    if latent.gated:
        rows, tokens = LatentRows.of(made.design, core, layer), made.design.chunk
        made.add("output", layer, ("edge_gate_heads", rows), lambda name: gate_heads(name, rows, tokens=tokens), {}, {})
