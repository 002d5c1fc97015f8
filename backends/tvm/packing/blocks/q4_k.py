"""Q4_K: super-blocks of 8 parts d · s · q − dmin · m, q of 4 bits, s and m of 6 bits for each part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edge.backends.tvm.packing.blocks.base import Bytes, IntegerBlock, Split, bits_of, numbers_at, plane


def numbers(raw: Bytes, start: int) -> NDArray[np.uint16]:
    """d and −dmin, from byte `start`."""
    return numbers_at(raw, start, 2) ^ np.array([0, 0x8000], np.uint16)


def factors(raw: Bytes) -> Bytes:
    """s and m of each part in turns, from 12 bytes.

    Those of the first 4 parts are the low 6 bits of bytes 0 … 3 and 4 … 7; the high 2 bits there belong to those of the
    last 4, whose lower halves are the nibbles of bytes 8 … 11.
    """
    rows, blocks, _ = raw.shape
    first, last = (each.reshape(rows, blocks, 2, 4) for each in (raw[:, :, :8], bits_of(raw[:, :, 8:], 4, 4)))
    both = np.concatenate([first & np.uint8(0x3F), last | first >> np.uint8(2) & np.uint8(0x30)], axis=-1)
    turns: Bytes = both.swapaxes(2, 3).reshape(rows, blocks, 16)
    return turns


def split(raw: Bytes) -> Split:
    """32 bytes hold two parts, one in the low halves."""
    return Split(plane(bits_of(raw[:, :, 16:], 4, 32), 4), numbers(raw, 0), factors(raw[:, :, 4:16]))


BLOCK = IntegerBlock("Q4_K", values=256, raw_bytes=144, planes=(4,), has_minimum=True, split=split)
