"""Q4_1: 32 values d · q + m, q of 4 bits in the order of Q4_0."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, numbers_at


def split(raw: Bytes) -> Split:
    return Split(raw[:, :, 4:], numbers_at(raw, 0, 2))


BLOCK = IntegerBlock("Q4_1", values=32, raw_bytes=20, planes=(4,), has_minimum=True, split=split)
