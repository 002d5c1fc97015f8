"""Q4_1: 32 values d · q + m, q of 4 bits in the order of Q4_0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.backends.tvm.blocks.base import Bytes, IntegerBlock, by_fours, scales_of
from edge.backends.tvm.blocks.q4_0 import registers


def pack(raw: Bytes) -> tuple[Bytes, NDArray[np.uint16]]:
    return np.ascontiguousarray(by_fours(raw[:, :, 4:])), scales_of(raw, 2)


BLOCK = IntegerBlock(
    "Q4_1", values=32, raw_bytes=20, quant_bytes=256, center=0, largest=15, signed=False, has_minimum=True,
    pack=pack, registers=registers,
)  # fmt: skip
