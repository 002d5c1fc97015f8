"""Floats of 8 bits, as tables of their values by byte: E4M3 and E5M2 (arXiv:2209.05433), and E8M0, powers of two."""

from __future__ import annotations

import numpy as np

from edge.types import FloatArray


def _table(exponent: int, mantissa: int) -> FloatArray:
    """The finite values: a sign, an exponent and a mantissa of these bits."""
    codes = np.arange(256)
    power, low = codes >> mantissa & (1 << exponent) - 1, codes & (1 << mantissa) - 1
    bias, steps = (1 << exponent - 1) - 1, 1 << mantissa
    values = np.where(power == 0, low, low + steps) * np.exp2(np.maximum(power, 1) - bias - mantissa)
    return np.asarray(np.where(codes < 128, values, -values), np.float32)


E4M3 = _table(4, 3)
E4M3[[127, 255]] = np.nan
E5M2 = _table(5, 2)
E5M2[[124, 252]] = np.inf, -np.inf
E5M2[[125, 126, 127, 253, 254, 255]] = np.nan
E8M0 = np.append(np.exp2(np.arange(255) - 127.0), np.nan).astype(np.float32)
