"""F32: as it is."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import FloatBlock

BLOCK = FloatBlock("F32", raw_bytes=4, dtype="float32", decode=lambda _isa, stored: stored)
