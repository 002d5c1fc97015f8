"""Storage of a head's row for each KV dtype, in NumPy; cpu/kernels/row_formats.py has the compiled functions.

int8: x = scale · code, scale = max |x| / 127.
int4: x = H (least + scale · code), code 0 … 15, scale = (max − min) / 15 of H x. H is a Hadamard matrix: few dimensions
of keys are far larger than the others, and H spreads them over all, as in QuaRot (arXiv:2404.00456). Queries are
multiplied by H too, which leaves scores unchanged; for values, attention's output is multiplied by H again.
"""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.cores import LANES
from edge.model.cores import Attention, RowShape
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

STEPS = 15  # between the least and the greatest of 4 bits
LARGEST = 65504  # of float16


@dataclass(frozen=True)
class RowFormat:
    """The storage of rows in one KV dtype."""

    memory: str  # NumPy's type of a stored element
    packed: int = 1  # values per element
    scale: str = "float32"  # their type
    scales: int = 0  # numbers stored per row of a head: the scale, and the least value
    transformed: bool = False  # rows are stored as H x

    def widths(self, row: RowShape) -> dict[str, int]:
        """Elements of each of the cache's arrays per row of a head. row: padded."""
        return {
            "keys": row.key // self.packed, "values": row.stored_value // self.packed,
            "key_scales": self.scales if row.key else 0, "value_scales": self.scales if row.stored_value else 0,
        }  # fmt: skip

    def bytes(self, row: RowShape) -> int:
        """Bytes of a row of a head. row: padded."""
        sizes = {"keys": self.memory, "values": self.memory, "key_scales": self.scale, "value_scales": self.scale}
        return sum(width * np.dtype(sizes[name]).itemsize for name, width in self.widths(row).items())


FORMATS = {
    "f32": RowFormat("float32"),
    "f16": RowFormat("float16"),
    "int8": RowFormat("int8", scales=1),
    "int4": RowFormat("uint8", packed=2, scale="float16", scales=2, transformed=True),
}

BALANCED = ("int8", "int4")  # dtypes in which the parts of a latent row share a scale (balance.py)


def centres_keys(core: Attention, dtype: str) -> bool:
    """Whether rows of keys lack what their biases have in common at all positions, which shifts all scores of a query
    alike. Qwen2.5 has biases 40 times as long as the rest of a key (github.com/ggml-org/llama.cpp, issue 21385), of
    which little would be left in BF16 or beside a common scale."""
    shifts = core.causal and not core.score_cap and not core.sinks and not core.head_norms and not core.latent
    return dtype != "f32" and "attn_k" in core.biases and core.makes_rows and shifts


def row_bytes(core: Attention, dtype: str) -> int:
    """Bytes of a token's row in one layer."""
    return core.row.heads * FORMATS[dtype].bytes(core.row.padded(LANES))


def encode(dtype: str, x: FloatArray) -> tuple[AnyArray, AnyArray]:
    """Quantize rows, float32 [..., head], to codes [..., head], one per element, and scales [..., scales]."""
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
    """Dequantize to float32 [..., head]; inverts `encode` except for rounding."""
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
    """Multiply x by H over the last axis; H = Hᵀ = H⁻¹, in blocks of the largest power of two that divides its
    length."""
    head = x.shape[-1]
    block = max(1, head & -head)
    parts, distance = x.reshape(*x.shape[:-1], head // block, block), 1
    while distance < block:
        pairs = parts.reshape(*parts.shape[:-1], block // (2 * distance), 2, distance)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        parts = np.stack([first + second, first - second], axis=-2).reshape(parts.shape)
        distance *= 2
    result: FloatArray = (parts * np.float32(block**-0.5)).reshape(x.shape)
    return result


def pack_keys(dtype: str, codes: AnyArray) -> AnyArray:
    """Pack codes [..., head] into elements. int4: two neighbours per byte, the first in the low half."""
    return np.asarray(codes[..., ::2] | codes[..., 1::2] << 4) if FORMATS[dtype].packed == 2 else codes


def unpack_keys(dtype: str, elements: AnyArray) -> AnyArray:
    if FORMATS[dtype].packed == 1:
        return elements
    return np.stack([elements & 15, elements >> 4], axis=-1).reshape(*elements.shape[:-1], 2 * elements.shape[-1])
