"""Weights of a GGUF file as ONNX Runtime's MatMulNBits wants them: blocks of 32, whole numbers, a scale, a zero point.

A weight is scale · (quant − zero). Q4_0 and Q8_0 are such grids and come through unchanged. Q4_1 and Q4_K have a
minimum that is no whole number of steps away from 0; ONNX Runtime knows such minima, too, but is 15 times slower with
them, so these blocks are rounded once more, to the grid with a whole zero point that is nearest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.errors import UnsupportedError
from edge.types import AnyArray, FloatArray

BLOCK = 32
_FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # all others would lose too much in four bits
_FLOATS = ("F32", "F16", "BF16")
_MIDDLE = {4: 8, 8: 128}  # the zero point where none is stated


@dataclass(frozen=True)
class Blocks:
    """quants: uint8 [rows, blocks, 32]; scales: float32 [rows, blocks]; zeros: uint8 [rows, blocks]."""

    quants: AnyArray
    scales: FloatArray
    zeros: AnyArray


def bits_of(kind: str) -> int:
    """Bits in which weights of this block type are kept: 4, 8, or 32 for float32."""
    return 32 if kind in _FLOATS else 4 if kind in _FOUR_BITS else 8


def has_zero_points(kind: str, bits: int) -> bool:
    return bits == 4 and kind != "Q4_0"


def to_blocks(raw: AnyArray, kind: str, type_id: int, bits: int) -> Blocks:
    """Rows of a tensor, uint8 [rows, row bytes], in 4 or 8 bits. Raises UnsupportedError for unreadable types."""
    if kind == "Q4_0" or (kind == "Q8_0" and bits == 8):
        return _as_they_are(raw, kind, bits)
    values = to_floats(raw, kind, type_id).reshape(len(raw), -1, BLOCK)
    return _nearest_with_zero(values) if bits == 4 else _nearest_symmetric(values)


def to_floats(raw: AnyArray, kind: str, type_id: int) -> FloatArray:
    """Rows of a tensor, uint8 [rows, row bytes], as float32 [rows, columns]."""
    if kind == "F32":
        return np.asarray(raw.view(np.float32))
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        return np.asarray(dequantize(raw, GGMLQuantizationType(type_id)), np.float32)
    except NotImplementedError:
        raise UnsupportedError(f"{kind} weights cannot be converted: quantize the model to another type") from None


def pack(quants: AnyArray, bits: int) -> AnyArray:
    """Quants uint8 [..., n] as bytes, [..., n · bits / 8]: of two 4-bit ones the first lies low; an odd last one has 0
    beside it."""
    if bits == 8:
        return quants
    if quants.shape[-1] % 2:
        quants = np.concatenate([quants, np.zeros((*quants.shape[:-1], 1), np.uint8)], axis=-1)
    return np.asarray(quants[..., 0::2] | (quants[..., 1::2] << 4))


def _as_they_are(raw: AnyArray, kind: str, bits: int) -> Blocks:
    blocks = raw.reshape(len(raw), -1, 18 if kind == "Q4_0" else 34)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0].astype(np.float32)
    if kind == "Q4_0":
        low, high = blocks[..., 2:] & 15, blocks[..., 2:] >> 4
        quants = np.concatenate([low, high], axis=-1) + np.uint8(_MIDDLE[bits] - 8)
    else:
        quants = blocks[..., 2:] + np.uint8(128)  # wraps: −1 is 255, and becomes 127
    return Blocks(quants, scales, np.full(scales.shape, _MIDDLE[bits], np.uint8))


def _nearest_symmetric(values: FloatArray) -> Blocks:
    scales = np.abs(values).max(axis=-1) / np.float32(127)
    steps = np.rint(values / _no_zeros(scales)[..., None])
    return Blocks((steps + 128).astype(np.uint8), scales, np.full(scales.shape, 128, np.uint8))


def _nearest_with_zero(values: FloatArray) -> Blocks:
    """4 bits, by least squares: the scale that spans the block, and its neighbours; for each, the zero points next to
    the best, and the scale that then fits best."""
    low, high = np.minimum(values.min(axis=-1), 0), np.maximum(values.max(axis=-1), 0)
    span = _no_zeros((high - low) / np.float32(15))
    best, least = None, np.full(span.shape, np.inf, np.float32)
    for stretch in (0.92, 0.96, 1.0, 1.04):
        scales = span * np.float32(stretch)
        for shift in (-0.5, 0.5):
            zeros = np.clip(np.rint(-low / scales + np.float32(shift * 0.5)), 0, 15)
            steps = np.clip(np.rint(values / scales[..., None]) + zeros[..., None], 0, 15) - zeros[..., None]
            fitted = (values * steps).sum(axis=-1) / _no_zeros((steps * steps).sum(axis=-1))
            errors = np.square(values - fitted[..., None] * steps).sum(axis=-1)
            better = errors < least
            if best is None:
                best = [steps, fitted, zeros]
            else:
                for kept, found in zip(best, (steps, fitted, zeros), strict=True):
                    kept[better] = found[better]
            least = np.where(better, errors, least)
    assert best is not None
    steps, fitted, zeros = best
    return Blocks((steps + zeros[..., None]).astype(np.uint8), fitted.astype(np.float32), zeros.astype(np.uint8))


def _no_zeros(array: AnyArray) -> FloatArray:
    return np.where(array == 0, np.float32(1), array).astype(np.float32)
