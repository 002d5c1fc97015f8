"""ONNX Runtime's GroupQueryAttention over a layer's rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edge.backends.onnx.graph.context import KV_TYPES, Context
from edge.backends.onnx.graph.nodes import MS
from edge.backends.onnx.graph.proto import Type
from edge.backends.onnx.rows import row_values
from edge.model.cores import Attention


def attend(graph: Context, core: Attention, layer: int, rows: Sequence[str], tables: Sequence[str] = ()) -> str:
    """Mix values, [1, n, heads · size]. rows: queries, new keys and new values, or one value that joins them and two
    empty names, of `as_rows`' type. tables: cosines and sines, if the operator is to rotate queries and keys."""
    graph.begin("attend", layer)
    source = core.source(layer)
    kind, ring = KV_TYPES[graph.kv_dtype], "ring_" if source in graph.kinds.ringed else ""
    row = core.row
    shape = (1, row.heads, f"{ring}capacity", row_values(row.key, graph.kv_dtype))
    for name in (f"past_key.{source}", f"past_value.{source}"):
        graph.input(name, kind, *shape)
    for name in (f"key.{layer}", f"value.{layer}"):
        graph.output(name, kind, *shape)
    how: dict[str, Any] = {"num_heads": core.heads, "kv_num_heads": row.heads, **score_attributes(core)}
    rotation = ["", "", ""]
    if tables:
        rotation, how["do_rotary"] = [*tables, "positions"], 1
    hidden = ""
    if core.window or graph.network.whole_pictures:  # whose masks are not causal by themselves
        hidden, how["causal"] = f"window.{layer}", int(not graph.network.whole_pictures)
        graph.input(hidden, graph.float_type, 1, f"seeing.{layer}", "n", f"{ring}seen")
    counts = [f"{ring}last", f"{ring}rows"]
    sinks = graph.weight(f"blk.{layer}.attn_sinks") if core.sinks else ""
    if sinks and graph.kv_dtype == "f16":
        sinks = graph.node("Cast", sinks, to=Type.FLOAT16)
    inputs = [*rows, f"past_key.{source}", f"past_value.{source}", *counts, *rotation, hidden, sinks]
    if graph.quantized:
        for name in (f"key_scales.{source}", f"value_scales.{source}"):
            graph.input(name, Type.FLOAT, 1, row.heads, 1, row.key)
            inputs.append(name)
        how |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL"}
        how["kv_cache_bit_width"] = int(graph.kv_dtype.removeprefix("int"))
    mixed = f"blk.{layer}.mixed"
    graph.emit("GroupQueryAttention", inputs, [mixed, f"key.{layer}", f"value.{layer}"], MS, **how)
    return graph.node("Cast", mixed, to=Type.FLOAT) if graph.kv_dtype == "f16" else mixed


def as_rows(graph: Context, x: str) -> str:
    """Queries, keys or values in the type that the operator computes in, which is also that of cosines and sines."""
    return graph.node("Cast", x, to=Type.FLOAT16) if graph.kv_dtype == "f16" else x


def score_attributes(core: Attention) -> dict[str, Any]:
    """Attributes of GroupQueryAttention, and of the standard's Attention, for the computation of scores."""
    return {"scale": core.scale} | ({"softcap": core.score_cap} if core.score_cap else {})


def show(graph: Context, layer: int, made: str, width: int) -> None:
    """Output the observed tokens' queries and new rows before RoPE, [1, k, width], where the graph is to do so."""
    if graph.observed:
        graph.output(f"qkv.{layer}", Type.FLOAT, 1, "k", width)
        graph.node("Gather", made, "observed", output=f"qkv.{layer}", axis=1)
