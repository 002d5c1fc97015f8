"""The softmax attention core: ONNX Runtime's GroupQueryAttention, and in static graphs the standard's Attention."""

from __future__ import annotations

from dataclasses import replace

from edge.backends.onnx.graph.attention.attend import as_rows, attend, score_attributes, show
from edge.backends.onnx.graph.attention.crossing import attend_across
from edge.backends.onnx.graph.attention.latent import latent_attention
from edge.backends.onnx.graph.context import KV_TYPES, Context, mask_name, table_names
from edge.backends.onnx.graph.proto import Type
from edge.backends.onnx.graph.state import reshape, rms, split
from edge.model.cores import Attention

_ROTARY_HEADS = 16  # GroupQueryAttention rotates heads whose size is a multiple of this
_SMALL_HEADS = 32  # heads of at most so many values, of which QNN's emulator normalizes several wrongly


def attention(graph: Context, core: Attention, layer: int, x: str) -> str:
    """Map normalized rows, [1, n, hidden], to the concatenated heads' outputs, [1, n, width]."""
    if core.latent:
        return latent_attention(graph, core, layer, x)
    qkv, gate = start_attention(graph, core, layer, x)
    if core.across:
        return attend_across(graph, core, layer, qkv)
    source = core.source(layer)
    show(graph, layer, qkv, observed_width(core))
    if source != layer:
        qkv = graph.node("Concat", qkv, graph.rows[source], axis=-1)
    elif any(each and each.rows_of == layer for each in graph.network.attention):
        graph.rows[layer] = split(graph, qkv, [core.width, core.row.values])[1]
    qkv, tables = as_rows(graph, qkv), tuple[str, ...]()
    if graph.network.rotates(layer):
        tables = table_names(graph.network.rope_of(layer))
        if core.head_dim % _ROTARY_HEADS:
            qkv, tables = _rotate_heads(graph, core, qkv, *tables), ()
    mixed = attend(graph, core, layer, [qkv, "", ""], tables)
    return graph.node("Mul", mixed, graph.node("Sigmoid", gate)) if gate else mixed


def static_attention(graph: Context, core: Attention, layer: int, x: str) -> str:
    """Like `attention`, for a fixed number of tokens. Queries before RoPE are appended to `graph.queries`."""
    qkv, _ = start_attention(graph, core, layer, x)
    queries, *new = split_heads(graph, core, qkv)
    apart = reshape(graph, queries, 1, 1, graph.tokens, core.width)
    widest = max(each.width for each in graph.network.attention if each)
    if widest > core.width:
        more = widest - core.width
        apart = graph.node("Pad", apart, graph.constant(f"{more} values more", [0] * 7 + [more]))
    graph.queries.append(apart)
    if graph.network.rotates(layer):
        tables = table_names(graph.network.rope_of(layer))
        queries, *new[:1] = (
            graph.node("RotaryEmbedding", each, *tables, num_heads=heads)
            for each, heads in zip([queries, *new[:1]], (core.heads, core.kv_heads), strict=False)
        )
    graph.begin("attend", layer)
    source = core.source(layer)
    if source not in graph.seen:
        new = [_by_head(graph, core, each, core.kv_heads) for each in new]
        graph.seen[source] = _behind_past(graph, core, source, new)
    queries = _by_head(graph, core, queries, core.heads)
    mixed = graph.node("Attention", queries, *graph.seen[source], mask_name(core.window), **score_attributes(core))
    return reshape(graph, graph.node("Transpose", mixed, perm=[0, 2, 1, 3]), 1, graph.tokens, core.width)


def observed_width(core: Attention) -> int:
    """Values of a token's queries, keys and values, of those that the layer has."""
    return core.queries + (core.row.values if core.rows_of is None else 0)


def start_attention(graph: Context, core: Attention, layer: int, x: str) -> tuple[str, str]:
    """Concatenated queries, keys and values before RoPE, and the gate of the output, if it has one."""
    at = f"blk.{layer}."
    graph.begin("qkv", layer)
    qkv, gate = _with_own_biases(graph, f"{at}qkv", graph.multiply(f"{at}qkv", x)), ""
    if core.gated:
        qkv, gate = split(graph, qkv, [core.width + core.row.values, core.width])
    if core.head_norms or core.unit_values:
        qkv = _norm_heads(graph, core, at, qkv)
    if core.temperature:
        queries, *others = split_heads(graph, core, qkv)
        qkv = graph.node("Concat", graph.node("Mul", queries, "temperatures"), *others, axis=-1)
    return qkv, gate


def _with_own_biases(graph: Context, name: str, product: str) -> str:
    """Add the biases of some of the joined matrices: Whisper's keys have none."""
    parts, vectors = graph.layout.matrices[name].parts, graph.layout.vectors
    if not any(f"{part.name}.bias" in vectors for part in parts):  # or they are joined, too
        return product
    own = split(graph, product, [part.source.rows for part in parts])
    for index, bias in enumerate(f"{part.name}.bias" for part in parts):
        own[index] = graph.node("Add", own[index], graph.weight(bias)) if bias in vectors else own[index]
    return graph.node("Concat", *own, axis=-1)


def split_heads(graph: Context, core: Attention, qkv: str) -> list[str]:
    """Split into queries, keys and values; a layer that reads other rows has queries only."""
    if core.rows_of is not None:
        return [qkv]
    row = core.row
    return split(graph, qkv, [core.width, row.heads * row.key, row.heads * row.value])


def _norm_heads(graph: Context, core: Attention, at: str, qkv: str) -> str:
    """Normalize queries and keys per head, or values."""
    parts = split_heads(graph, core, qkv)
    names = ["attn_q_norm", "attn_k_norm"] if core.head_norms else ["", ""]
    for index, name in enumerate([*names, ""][: len(parts)]):
        if name or (index == 2 and core.unit_values):
            apart = reshape(graph, parts[index], 0, 0, -1, core.head_dim)
            if name and core.head_dim > _SMALL_HEADS:
                normed = graph.norm(apart, at + name)
            else:
                normed = rms(graph, apart, graph.spec.norm_eps)
                normed = graph.node("Mul", normed, graph.weight(at + name)) if name else normed
            parts[index] = reshape(graph, normed, 0, 0, -1)
    return graph.node("Concat", *parts, axis=-1) if len(parts) > 1 else parts[0]


def _rotate_heads(graph: Context, core: Attention, qkv: str, cos: str, sin: str) -> str:
    """Rotate queries and keys before the attention operator, for head sizes that it cannot rotate."""
    parts = split_heads(graph, replace(core, rows_of=None), qkv)
    for index, heads in enumerate((core.heads, core.kv_heads)):
        parts[index] = graph.node("RotaryEmbedding", parts[index], cos, sin, "positions", num_heads=heads)
    return graph.node("Concat", *parts, axis=-1)


def _by_head(graph: Context, core: Attention, x: str, heads: int) -> str:
    """Transpose [1, n, heads · head] to [1, heads, n, head]."""
    return graph.node("Transpose", reshape(graph, x, 1, graph.tokens, heads, core.head_dim), perm=[0, 2, 1, 3])


def _behind_past(graph: Context, core: Attention, layer: int, new: list[str]) -> list[str]:
    """Keys and values of a layer's rows in the cache and of the new rows behind them, which are outputs, too. new: keys
    and values; empty in a graph behind the layer's, which has the new rows as inputs."""
    kind, row, found = KV_TYPES[graph.kv_dtype], core.row, []
    shape = (1, row.heads, graph.tokens, row.key)
    for index, name in enumerate((f"key.{layer}", f"value.{layer}")):
        graph.input(f"past_{name}", kind, 1, row.heads, graph.rows_of(core.window), row.key)
        both = [f"past_{name}"]
        if new:
            graph.output(name, kind, *shape)
            graph.node("Cast", new[index], to=kind, output=name)
        else:
            graph.input(f"new_{name}", kind, *shape)
            both.append(f"new_{name}")
        cast = both if kind == Type.FLOAT else [graph.node("Cast", each, to=Type.FLOAT) for each in both]
        found.append(graph.node("Concat", *cast, *new[index : index + 1], axis=2))
    return found
