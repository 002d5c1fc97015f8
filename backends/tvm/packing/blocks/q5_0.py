"""Q5_0: 32 values d · (q − 16), q of 5 bits: a word with the highest bits, the others in the order of Q4_0."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, numbers_at, plane


def quants(raw: Bytes) -> Bytes:
    """From the word and the nibbles; Q5_1 has them, too."""
    high = np.unpackbits(raw[:, :, :4], axis=-1, bitorder="little")
    return np.concatenate([raw[:, :, 4:], plane(high, 1)], axis=-1)


def split(raw: Bytes) -> Split:
    return Split(quants(raw[:, :, 2:]), numbers_at(raw, 0, 1))


BLOCK = IntegerBlock("Q5_0", values=32, raw_bytes=22, planes=(4, 1), center=16, split=split)
