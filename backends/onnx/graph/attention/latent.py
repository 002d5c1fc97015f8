"""Multi-head latent attention in its absorbed form (`edge.model.cores.Latent`): keys and values share their memory.

A layer's outputs `key.N` and `value.N` are the same rows, and are bound to the same memory. The heads' own matrices,
`attn_k_b` and `attn_v_b`, are float32, since ONNX Runtime has no product of several quantized matrices at once.
"""

from __future__ import annotations

from edge.backends.onnx.graph.attention.attend import as_rows, attend, show
from edge.backends.onnx.graph.context import Context, table_names
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.state import reshape, split
from edge.model.cores import Attention


def latent_attention(graph: Context, core: Attention, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the concatenated heads' outputs, [1, n, width]."""
    latent, at, heads = core.latent, f"blk.{layer}.", core.heads
    assert latent
    graph.begin("qkv", layer)
    ranked = graph.norm(graph.multiply(f"{at}attn_q_a", x), f"{at}attn_q_a_norm") if latent.rank else x
    queries = graph.multiply(f"{at}attn_q_b" if latent.rank else f"{at}attn_q", ranked)
    plain, ends = split(graph, reshape(graph, queries, 0, 0, heads, -1), [latent.plain, core.rope.dim])
    rank = core.row.value
    matrices = (heads, latent.plain, rank) if latent.joined else (heads, rank, latent.plain)
    beginnings = _by_head(graph, plain, f"{at}attn_k_b", matrices, transposed=not latent.joined)
    values, key = split(graph, graph.multiply(f"{at}attn_kv_a_mqa", x), [rank, core.rope.dim])
    values = graph.norm(values, f"{at}attn_kv_a_norm")
    if graph.observed:
        both = reshape(graph, graph.node("Concat", beginnings, ends, axis=-1), 0, 0, -1)
        made = graph.node("Concat", both, values, key, axis=-1)
        show(graph, layer, made, core.queries + core.row.values)
    tables = table_names(graph.network.rope_of(layer))
    beginnings, values = as_rows(graph, beginnings), as_rows(graph, values)
    ends = graph.node(
        "RotaryEmbedding", as_rows(graph, reshape(graph, ends, 0, 0, -1)), *tables, "positions", num_heads=heads
    )
    key = graph.node("RotaryEmbedding", as_rows(graph, key), *tables, "positions", num_heads=1)
    whole = graph.node("Concat", beginnings, reshape(graph, ends, 0, 0, heads, -1), axis=-1)
    row = graph.node("Concat", values, key, axis=-1)
    mixed = reshape(graph, attend(graph, core, layer, [reshape(graph, whole, 0, 0, -1), row, row]), 0, 0, heads, -1)
    graph.begin("output", layer)
    mixed, _ = split(graph, mixed, [rank, core.rope.dim])
    out = _by_head(graph, mixed, f"{at}attn_v_b", (heads, latent.value, rank), transposed=True)
    if latent.gated:
        gates = graph.node("Sigmoid", graph.multiply(f"{at}attn_gate", x))
        out = graph.node("Mul", out, reshape(graph, gates, 0, 0, heads, 1))
    return reshape(graph, out, 0, 0, -1)


def _by_head(graph: Context, x: str, name: str, shape: tuple[int, int, int], *, transposed: bool) -> str:
    """Each head's row of x, [1, n, heads, columns], times the head's matrix: [1, n, heads, rows]."""
    matrices = graph.weight(name, shape, "heads")
    apart = graph.node("Transpose", x, perm=[0, 2, 1, 3])
    product = graph.node("FusedMatMul", apart, matrices, domain=MS, transB=int(transposed))
    return graph.node("Transpose", product, perm=[0, 2, 1, 3])
