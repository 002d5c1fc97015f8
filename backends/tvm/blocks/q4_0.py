"""Q4_0: 32 values d · (q − 8), q of 4 bits; the low half of byte i is value i, the high half value i + 16."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.backends.tvm.blocks.base import Bytes, IntegerBlock, Value, by_fours, scales_of


def pack(raw: Bytes) -> tuple[Bytes, NDArray[np.uint16]]:
    """The two halves of a byte stay together, so the bytes only move."""
    return np.ascontiguousarray(by_fours(raw[:, :, 2:])), scales_of(raw, 1)


def registers(read: Callable[[int], Value]) -> Sequence[Value]:
    from edge.backends.tvm.kernels.lanes import high_nibbles, let, low_nibbles

    words = [let(read(index)) for index in range(4)]
    return [let(low_nibbles(word)) for word in words] + [let(high_nibbles(word)) for word in words]


BLOCK = IntegerBlock(
    "Q4_0", values=32, raw_bytes=18, quant_bytes=256, center=8, largest=15, signed=False, has_minimum=False,
    pack=pack, registers=registers,
)  # fmt: skip
