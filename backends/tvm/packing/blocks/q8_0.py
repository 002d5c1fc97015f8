"""Q8_0: 32 values d · q, q signed bytes."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, numbers_at


def split(raw: Bytes) -> Split:
    return Split(raw[:, :, 2:], numbers_at(raw, 0, 1))


BLOCK = IntegerBlock("Q8_0", values=32, raw_bytes=34, planes=(8,), signed=True, split=split)
