"""Weights of a GGUF file for ONNX Runtime's MatMulNBits: blocks of 32 integers, a scale, a zero point.

A weight is scale · (quant − zero). Q4_0, Q5_0, Q8_0 and IQ4_NL are such grids and stay unchanged (IQ4_NL's sixteen
levels are integers of 8 bits). Q4_1 and Q4_K have a minimum that is not a multiple of the scale. ONNX Runtime supports
such minima, but is 15 times slower with them; rounding to an integral zero point costs a fifth of the perplexity.
However, the remainder after an integral zero point is the same for all weights of a block, so it can be multiplied by
the mean of the block's inputs: one more column for every 32, in 4 bits as well, which is exact enough by far. Weights
of other types are rounded to 8 bits.
"""

from __future__ import annotations

import numpy as np

from edge.formats import blocks as formats
from edge.formats.blocks import BLOCK, FLOATS, GRIDS
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_FOUR_BITS = (*(kind for kind, grid in GRIDS.items() if grid.uniform and grid.bits == 4), "Q4_K")
_EXACT = {4: _FOUR_BITS, 8: (*(kind for kind, grid in GRIDS.items() if not grid.minima), "MXFP4")}
_MIDDLE = {4: 8, 8: 128}  # the zero point where none is stated


@dataclass(frozen=True)
class Blocks:
    """Weights in blocks."""

    quants: AnyArray  # uint8 [rows, blocks, 32]
    scales: FloatArray  # float32 [rows, blocks]
    zeros: AnyArray  # uint8 [rows, blocks]
    rest: FloatArray | None = None  # float32 [rows, blocks]: added to all weights of a block; None: nothing


def bits_of(kind: str) -> int:
    """Bits per stored weight of this block type: 4, 8, or 32 for floats."""
    return 32 if kind in FLOATS else 4 if kind in _FOUR_BITS else 8


def is_exact(kind: str, bits: int) -> bool:
    """Whether weights of this type are stored without loss; others are rounded to 8 bits."""
    return kind in _EXACT[bits]


def has_minimum(kind: str, bits: int) -> bool:
    """Whether blocks of this type have zero points and a rest."""
    return bits == 4 and kind not in _EXACT[8]


def to_blocks(raw: AnyArray, kind: str, bits: int) -> Blocks:
    """Convert rows, uint8 [rows, row bytes], of a type that is stored without loss."""
    found = formats.unpack(raw, kind)
    if found.minima is not None:
        return _with_minimum(found.quants.view(np.uint8), found.scales, found.minima)
    zero = np.uint8(_MIDDLE[bits])
    quants = found.quants.view(np.uint8) + zero  # wraps: −1 is 255, and becomes zero − 1
    return Blocks(quants, found.scales, np.full(found.scales.shape, zero, np.uint8))


def nearest(values: FloatArray) -> Blocks:
    """Round weights, float32 [rows, columns], to 8 bits."""
    blocks = values.reshape(len(values), -1, BLOCK)
    scales = np.abs(blocks).max(axis=-1) / np.float32(127)
    steps = np.rint(blocks / _no_zeros(scales)[..., None])
    return Blocks((steps + 128).astype(np.uint8), scales, np.full(scales.shape, 128, np.uint8))


def with_means(blocks: Blocks) -> Blocks:
    """Append the columns that multiply the means of input blocks: blocks of 32, the last padded."""
    rows, count = blocks.scales.shape
    rest = np.zeros((rows, -(-count // BLOCK) * BLOCK), np.float32)
    if blocks.rest is not None:
        rest[:, :count] = blocks.rest * np.float32(BLOCK)
    rest = rest.reshape(rows, -1, BLOCK)
    scales = np.abs(rest).max(axis=-1) / np.float32(7)
    quants = (np.rint(rest / _no_zeros(scales)[..., None]) + 8).astype(np.uint8)
    return Blocks(
        np.concatenate([blocks.quants, quants], axis=1),
        np.concatenate([blocks.scales, scales], axis=1),
        np.concatenate([blocks.zeros, np.full(scales.shape, 8, np.uint8)], axis=1),
    )


def pack(quants: AnyArray, bits: int) -> AnyArray:
    """Pack quants uint8 [..., n] into bytes [..., n · bits / 8]: 4-bit ones in pairs, the first low; an odd last one is
    paired with 0."""
    if bits == 8:
        return quants
    if quants.shape[-1] % 2:
        quants = np.concatenate([quants, np.zeros((*quants.shape[:-1], 1), np.uint8)], axis=-1)
    return np.asarray(quants[..., 0::2] | (quants[..., 1::2] << 4))


def unpack(packed: AnyArray, bits: int) -> AnyArray:
    """The inverse of `pack`, [..., bytes · 8 / bits]."""
    if bits == 8:
        return packed
    return np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)


@np.errstate(all="ignore")  # of damaged scales
def _with_minimum(quants: AnyArray, scales: FloatArray, minima: FloatArray) -> Blocks:
    zeros = np.clip(np.rint(-minima / _no_zeros(scales)), 0, 15)
    return Blocks(quants, scales, zeros.astype(np.uint8), minima + scales * zeros)


def _no_zeros(array: AnyArray) -> FloatArray:
    return np.where(array == 0, np.float32(1), array).astype(np.float32)
