"""Q4_0: 32 values d · (q − 8), q of 4 bits; the low half of byte i is value i, the high half value i + 16."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, numbers_at


def split(raw: Bytes) -> Split:
    return Split(raw[:, :, 2:], numbers_at(raw, 0, 1))


BLOCK = IntegerBlock("Q4_0", values=32, raw_bytes=18, planes=(4,), center=8, split=split)
