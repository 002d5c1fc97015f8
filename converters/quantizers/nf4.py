"""NF4 (QLoRA, arXiv:2305.14314): 16 quantiles of the normal distribution, scaled by the largest weight of 64.

GGUF has no such type: there the values are stored in float16.
"""

from __future__ import annotations

import numpy as np

from edge.types import AnyArray, FloatArray

BLOCK = 64
LEVELS = np.array(
    [-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0, 0.0795803, 0.1609302,
     0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0], np.float32)  # fmt: skip


def quantize_nf4(weight: FloatArray) -> tuple[AnyArray, FloatArray]:
    """Codes uint8 [rows, columns] and the largest |w| of each block, float32 [rows, blocks]; weight: float32
    [rows, columns], the last block of a row may be shorter."""
    columns = weight.shape[1]
    largest = np.maximum.reduceat(np.abs(weight), np.arange(0, columns, BLOCK), axis=1)
    spread = np.repeat(np.where(largest == 0, np.float32(1), largest), BLOCK, axis=1)[:, :columns]
    return np.searchsorted((LEVELS[1:] + LEVELS[:-1]) / 2, weight / spread).astype(np.uint8), largest


def dequantize_nf4(codes: AnyArray, largest: FloatArray) -> FloatArray:
    """float32 [rows, columns]."""
    return np.asarray(LEVELS[codes] * np.repeat(largest, BLOCK, axis=1)[:, : codes.shape[1]], np.float32)
