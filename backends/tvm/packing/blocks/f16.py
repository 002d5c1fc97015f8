"""F16: IEEE half precision."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import FloatBlock

BLOCK = FloatBlock("F16", raw_bytes=2, dtype="uint16", decode=lambda isa, stored: isa.from_f16(stored))
