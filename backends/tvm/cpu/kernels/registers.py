"""Packed weights as the kernel reads them: registers of integers, or floats."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from edge.backends.tvm.cpu.kernels.isa import Isa
from edge.backends.tvm.cpu.kernels.lanes import Value, let, move_bits, shift_to_float
from edge.backends.tvm.packing.blocks import FloatBlock, IntegerBlock


def read_registers(block: IntegerBlock, isa: Isa, read: Callable[[int], Value]) -> list[Value]:
    """The values 4i … 4i+3 of a part as the 4 bytes of each lane, for every i.

    read: gives the i-th 64 bytes of a packed part as 16 int32 lanes.
    """
    found: list[Value] = []
    for bits, first in zip(block.planes, accumulate(block.planes, initial=0), strict=False):
        words = [let(read(first + index)) for index in range(bits)]
        fields = [let(move_bits(word, bits, at, first)) for at in range(0, 8, bits) for word in words]
        found = [let(low | high) for low, high in zip(found, fields, strict=True)] if found else fields
    return [let(isa.lookup(block.codebook, each)) for each in found] if block.codebook else found


def to_floats(block: FloatBlock, isa: Isa, stored: Value) -> Value:
    """16 stored values of F32, F16 or BF16 (unsigned integers but for F32) as float32."""
    if block.name == "F16":
        return isa.from_f16(stored)
    return shift_to_float(stored, 16) if block.name == "BF16" else stored
