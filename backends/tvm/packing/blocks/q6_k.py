"""Q6_K: super-blocks of 256 values d · s · (q − 32), q of 6 bits, a signed byte s for every 16."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, bits_of, numbers_at, plane


def split(raw: Bytes) -> Split:
    """64 bytes hold the low 4 bits of 128 values, 32 others their high 2 bits."""
    low, high = plane(bits_of(raw[:, :, :128], 4, 64), 4), plane(bits_of(raw[:, :, 128:192], 2, 32), 2)
    return Split(np.concatenate([low, high], axis=-1), numbers_at(raw, 208, 1), raw[:, :, 192:208])


BLOCK = IntegerBlock("Q6_K", values=256, raw_bytes=210, planes=(4, 2), center=32, span=16, split=split)
