"""BF16: the upper half of a float32."""

from __future__ import annotations

from typing import Any

from edge.backends.tvm.packing.blocks.base import FloatBlock, Value


def decode(_isa: Any, stored: Value) -> Value:
    from edge.backends.tvm.cpu.kernels.lanes import shift_to_float

    return shift_to_float(stored, 16)


BLOCK = FloatBlock("BF16", raw_bytes=2, dtype="uint16", decode=decode)
