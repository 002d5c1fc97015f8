"""NF4, the 4-bit NormalFloat of QLoRA (arXiv:2305.14314): sixteen levels, equally likely for normal weights.

Every 64 weights share their largest magnitude as their scale. GGUF has no such type and stores the values in F16.
"""

from __future__ import annotations

import numpy as np

from edge.types import AnyArray, FloatArray

BLOCK = 64
LEVELS = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
_BETWEEN = (LEVELS[:-1] + LEVELS[1:]) / 2


@np.errstate(all="ignore")  # of values that are not finite, or whose scales are not
def quantize(values: FloatArray) -> tuple[AnyArray, FloatArray]:
    """Quantize float32 [rows, n] to level numbers, uint8 [rows, n], and scales, float32 [rows, blocks]; a row's last
    block may be shorter."""
    columns = values.shape[1]
    scales = np.maximum.reduceat(np.abs(values), np.arange(0, columns, BLOCK), axis=1)
    spread = np.repeat(np.where(scales == 0, np.float32(1), scales), BLOCK, axis=1)[:, :columns]
    return np.searchsorted(_BETWEEN, values / spread).astype(np.uint8), scales


@np.errstate(all="ignore")
def dequantize(codes: AnyArray, scales: FloatArray) -> FloatArray:
    """The inverse of `quantize`."""
    return np.asarray(LEVELS[codes] * np.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]], np.float32)


def pack(codes: AnyArray) -> AnyArray:
    """Pack two codes a byte, the first in the high half, as bitsandbytes does."""
    return np.asarray(codes[..., 0::2] << 4 | codes[..., 1::2])


def unpack(packed: AnyArray) -> AnyArray:
    return np.stack([packed >> 4, packed & 15], axis=-1).reshape(*packed.shape[:-1], -1)
