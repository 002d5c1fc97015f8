"""Q3_K: super-blocks of 256 values d · (s − 32) · (q − 4), q of 3 bits, s of 6 bits for every 16."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, bits_of, numbers_at, plane


def split(raw: Bytes) -> Split:
    """The scales' low 4 bits are 8 bytes, their high 2 bits 4 more; s − 32 is stored, a signed byte."""
    high, low = plane(bits_of(raw[:, :, :32], 1, 32), 1), plane(bits_of(raw[:, :, 32:96], 2, 32), 2)
    scales = bits_of(raw[:, :, 96:104], 4, 8) | bits_of(raw[:, :, 104:108], 2, 4) << 4
    return Split(np.concatenate([low, high], axis=-1), numbers_at(raw, 108, 1), scales - np.uint8(32))


BLOCK = IntegerBlock("Q3_K", values=256, raw_bytes=110, planes=(2, 1), center=4, span=16, split=split)
