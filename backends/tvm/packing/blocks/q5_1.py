"""Q5_1: 32 values d · q + m, q of 5 bits in the order of Q5_0."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, numbers_at
from edge.backends.tvm.packing.blocks.q5_0 import quants


def split(raw: Bytes) -> Split:
    return Split(quants(raw[:, :, 4:]), numbers_at(raw, 0, 2))


BLOCK = IntegerBlock("Q5_1", values=32, raw_bytes=24, planes=(4, 1), has_minimum=True, split=split)
