"""LoRA adapters as the kernels read them: beside the packed weights, in memory of their own that is never streamed.

A is packed like any matrix, in Q8_0 where activations are quantized anyway, which halves what a step reads. B is packed
in floats; its few columns are the ranks. Ranks are padded with zeros to whole vectors. TVM is not needed.
"""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.design import low_rank_blocks
from edge.backends.tvm.packing.blocks import BLOCKS, TILE
from edge.backends.tvm.packing.layout import ALIGNMENT, PackedLayout, Place, Shape, round_up
from edge.backends.tvm.packing.weights import pad_rows
from edge.errors import ModelFormatError
from edge.formats.blocks import BLOCK, GRIDS, QuantizedMatrix, half
from edge.model.lora import Lora
from edge.types import AnyArray, FloatArray

Offsets = dict[str, int]
"""Bytes from the start of the adapters' memory, by the names of `Table.PER_LAYER`; 0 stands for no adapter."""


def padded_rank(rank: int) -> int:
    return round_up(rank, TILE)


def adapter_bytes(shape: Shape, rank: int, *, exact: bool) -> int:
    """Memory for adapters of all matrices of all layers. exact: in float32."""
    if not rank:
        return 0
    values = 0
    for name, rows, columns in (
        ("attn_q", shape.heads * shape.padded_head, shape.hidden),
        ("attn_k", shape.kv_heads * shape.padded_head, shape.hidden),
        ("attn_v", shape.kv_heads * shape.padded_head, shape.hidden),
        ("attn_output", shape.padded_hidden, shape.heads * shape.head),
        ("ffn_gate", shape.padded_ffn, shape.hidden),
        ("ffn_up", shape.padded_ffn, shape.hidden),
        ("ffn_down", shape.padded_hidden, shape.ffn),
    ):
        values += rows + columns if shape.gated or name != "ffn_gate" else 0
    size = 4 if exact else 2
    return ALIGNMENT + shape.layers * (values * padded_rank(rank) * size + len(shape.groups) * 2 * 3 * ALIGNMENT)


def pack_adapters(lora: Lora, layout: PackedLayout, out: AnyArray, *, exact: bool) -> list[Offsets]:
    """Write the adapters of every layer to `out`, uint8; returns where.

    Raises ModelFormatError for values that are not finite, or beyond what float16 holds.
    """
    rank, at, found = padded_rank(lora.size.rank), ALIGNMENT, []
    for layer in range(layout.shape.layers):
        offsets: Offsets = {}
        for group, names in layout.shape.groups.items():
            blocks = low_rank_blocks(layout.variants[group], exact=exact)
            for name in names:
                place = layout.places[f"blk.{layer}.{name}"]
                if not lora.changes(place.source):
                    continue
                a, b = lora.matrices(place.source)
                quants, scales = _pack_a(a, blocks[0], rank)
                parts = {f"{name}.lora_a": quants, f"{name}.lora_a.scales": scales}
                for slot, packed in (parts | {f"{name}.lora_b": _pack_b(b, blocks[1], rank, place)}).items():
                    if packed.size:
                        out[at : at + packed.size] = packed.reshape(-1)
                        offsets[slot], at = at, round_up(at + packed.size, ALIGNMENT)
        found.append(offsets)
    return found


def _pack_a(a: FloatArray, kind: str, rank: int) -> tuple[AnyArray, AnyArray]:
    """Quants and scales of A, [rank, columns]."""
    block, padded = BLOCKS[kind], np.zeros((rank, a.shape[1]), np.float32)
    padded[: len(a)] = a
    if kind != "Q8_0":
        data = _floats(padded, kind)
    else:
        blocks = padded.reshape(rank, -1, BLOCK)
        scales = half(np.abs(blocks).max(axis=-1) / np.float32(127))
        codes = GRIDS[kind].codes(padded, np.repeat(scales, BLOCK, axis=1))
        data = QuantizedMatrix(GRIDS[kind], codes, _finite(scales)).data
    quants, factors = block.pack(data.reshape(rank, -1, block.raw_bytes))
    return quants.view(np.uint8).reshape(-1), factors.view(np.uint8).reshape(-1)


def _pack_b(b: FloatArray, kind: str, rank: int, place: Place) -> AnyArray:
    """B, [rows, rank], its rows in the order of the matrix."""
    block, padded = BLOCKS[kind], np.zeros((len(b), rank), np.float32)
    padded[:, : b.shape[1]] = b
    rows = pad_rows(_floats(padded, kind), place.unit, place.interleaved)
    return block.pack(rows.reshape(len(rows), rank, block.raw_bytes))[0].view(np.uint8).reshape(-1)


def _floats(values: FloatArray, kind: str) -> AnyArray:
    """uint8 [rows, bytes of a row]."""
    with np.errstate(over="ignore"):
        stored = values if kind == "F32" else values.astype(np.float16)
    return np.ascontiguousarray(_finite(stored)).view(np.uint8)


def _finite(values: AnyArray) -> AnyArray:
    if not np.isfinite(values).all():
        raise ModelFormatError("the adapter's values are too large for float16: lower its scale")
    return values
