"""Q2_K: super-blocks of 256 values d · s · q − dmin · m, q of 2 bits, s and m of 4 bits for every 16."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, bits_of, plane
from edge.backends.tvm.packing.blocks.q4_k import numbers


def split(raw: Bytes) -> Split:
    """32 bytes hold 128 values. A byte of scales has s in its low half."""
    return Split(plane(bits_of(raw[:, :, 16:80], 2, 32), 2), numbers(raw, 80), raw[:, :, :16])


BLOCK = IntegerBlock("Q2_K", values=256, raw_bytes=84, planes=(2,), span=16, has_minimum=True, split=split)
