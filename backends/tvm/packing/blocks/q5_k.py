"""Q5_K: as Q4_K, q of 5 bits: 32 bytes hold the highest bits, each those of one part."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, bits_of, plane
from edge.backends.tvm.packing.blocks.q4_k import factors, numbers


def split(raw: Bytes) -> Split:
    high, low = plane(bits_of(raw[:, :, 16:48], 1, 32), 1), plane(bits_of(raw[:, :, 48:], 4, 32), 4)
    return Split(np.concatenate([low, high], axis=-1), numbers(raw, 0), factors(raw[:, :, 4:16]))


BLOCK = IntegerBlock("Q5_K", values=256, raw_bytes=176, planes=(4, 1), has_minimum=True, split=split)
