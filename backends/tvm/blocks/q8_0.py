"""Q8_0: 32 values d · q, q signed bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from edge.backends.tvm.blocks.base import Bytes, IntegerBlock, Value, by_fours, scales_of


def pack(raw: Bytes) -> tuple[Bytes, NDArray[np.uint16]]:
    return np.ascontiguousarray(by_fours(raw[:, :, 2:])), scales_of(raw, 1)


def registers(read: Callable[[int], Value]) -> Sequence[Value]:
    from edge.backends.tvm.kernels.lanes import let

    return [let(read(index)) for index in range(8)]


BLOCK = IntegerBlock(
    "Q8_0", values=32, raw_bytes=34, quant_bytes=512, center=0, largest=127, signed=True, has_minimum=False,
    pack=pack, registers=registers,
)  # fmt: skip
