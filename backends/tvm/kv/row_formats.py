"""How each KV dtype stores a row of one head, with NumPy's functions; cpu/kernels/row_formats.py has the compiled ones.

int8: x = scale · code, scale = max |x| / 127.
int4: x = H (least + scale · code), code 0 … 15, scale = (max − min) / 15 of H x. H is a Hadamard matrix: few dimensions
of keys are far larger than the others, and H spreads them over all, as in QuaRot (arXiv:2404.00456). Queries are
multiplied by H too, which leaves scores unchanged; for values, attention's output is multiplied by H again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.backends.tvm.packing.shape import padded_head
from edge.model.layers import Attention
from edge.types import AnyArray, FloatArray

STEPS = 15  # between the least and the greatest of 4 bits
LARGEST = 65504  # of float16


@dataclass(frozen=True)
class RowFormat:
    """memory: NumPy's type of an element of keys and values, which holds `packed` of them. `scales` numbers of type
    `scale` belong to every row of every head: the scale, and the least value. transformed: rows are stored as H x.
    """

    memory: str
    packed: int = 1
    scale: str = "float32"
    scales: int = 0
    transformed: bool = False

    def widths(self, head: int) -> dict[str, int]:
        """Elements of each of the cache's arrays for one row of a head."""
        width = head // self.packed
        return {"keys": width, "values": width, "key_scales": self.scales, "value_scales": self.scales}


FORMATS = {
    "f32": RowFormat("float32"),
    "f16": RowFormat("float16"),
    "int8": RowFormat("int8", scales=1),
    "int4": RowFormat("uint8", packed=2, scale="float16", scales=2, transformed=True),
}


def row_bytes(core: Attention, dtype: str) -> int:
    """Bytes of a token in one layer."""
    form = FORMATS[dtype]
    codes = padded_head(core.head_dim) // form.packed * np.dtype(form.memory).itemsize
    return 2 * core.kv_heads * (codes + form.scales * np.dtype(form.scale).itemsize)


def encode(dtype: str, x: FloatArray) -> tuple[AnyArray, AnyArray]:
    """Rows float32 [..., head] as codes [..., head], one per element, and scales [..., scales]."""
    form = FORMATS[dtype]
    if dtype == "int8":
        scales = np.abs(x).max(axis=-1, keepdims=True) / np.float32(127)
        return np.rint(x / np.where(scales > 0, scales, 1)).astype(np.int8), scales
    if dtype == "int4":
        x = hadamard(x)
        least = x.min(axis=-1, keepdims=True)
        scale = (x.max(axis=-1, keepdims=True) - least) * np.float32(1 / STEPS)
        scales = np.concatenate([scale, least], axis=-1).clip(-LARGEST, LARGEST).astype(np.float16)
        scale, least = np.split(scales.astype(np.float32), 2, axis=-1)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        return np.rint((x - least) * inverse).clip(0, STEPS).astype(np.uint8), scales
    return x.astype(form.memory), np.zeros((*x.shape[:-1], 0), form.scale)


def decode(dtype: str, codes: AnyArray, scales: AnyArray) -> FloatArray:
    """The inverse of `encode`, except for rounding: float32 [..., head]."""
    x: FloatArray = codes.astype(np.float32)
    if dtype == "int8":
        x *= scales
    elif dtype == "int4":
        scale, least = np.split(scales.astype(np.float32), 2, axis=-1)
        x *= scale
        x += least
        x = hadamard(x)
    return x


def hadamard(x: FloatArray) -> FloatArray:
    """x H over the last axis; H = Hᵀ = H⁻¹, in blocks of the largest power of two that divides its length."""
    head = x.shape[-1]
    block = head & -head
    parts, distance = x.reshape(*x.shape[:-1], -1, block), 1
    while distance < block:
        pairs = parts.reshape(*parts.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        parts = np.stack([first + second, first - second], axis=-2).reshape(parts.shape)
        distance *= 2
    result: FloatArray = (parts * np.float32(block**-0.5)).reshape(x.shape)
    return result


def pack_keys(dtype: str, codes: AnyArray) -> AnyArray:
    """Codes [..., head] as elements. int4: two neighbours in a byte, the first in the low half."""
    return _joined(codes[..., ::2], codes[..., 1::2]) if FORMATS[dtype].packed == 2 else codes


def unpack_keys(dtype: str, elements: AnyArray) -> AnyArray:
    if FORMATS[dtype].packed == 1:
        return elements
    return np.stack([elements & 15, elements >> 4], axis=-1).reshape(*elements.shape[:-1], -1)


def pack_values(dtype: str, codes: AnyArray) -> AnyArray:
    """Codes [..., head] as elements. int4: a byte holds two that are 16 apart, of every 32; 8 apart, of the last 16."""
    if FORMATS[dtype].packed == 1:
        return codes
    pairs = _value_pairs(codes)
    return np.concatenate([_joined(each[..., 0, :], each[..., 1, :]) for each in pairs], axis=-1)


def unpack_values(dtype: str, elements: AnyArray) -> AnyArray:
    if FORMATS[dtype].packed == 1:
        return elements
    codes = np.zeros((*elements.shape[:-1], 2 * elements.shape[-1]), np.uint8)
    at = 0
    for pair in _value_pairs(codes):
        part = elements[..., at : at + pair.shape[-1]]
        pair[..., 0, :], pair[..., 1, :] = part & 15, part >> 4
        at += pair.shape[-1]
    return codes


def _joined(low: AnyArray, high: AnyArray) -> AnyArray:
    return np.asarray(low | high << 4)


def _value_pairs(codes: AnyArray) -> list[AnyArray]:
    """Views [..., 2, 16] of every 32 codes, and [..., 2, 8] of the rest."""
    starts = range(0, codes.shape[-1], 32)
    return [codes[..., start : start + 32].reshape(*codes.shape[:-1], 2, -1) for start in starts]
