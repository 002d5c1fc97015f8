"""IQ4_NL: 32 values d · codebook[q], q of 4 bits in the order of Q4_0."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks.base import IntegerBlock
from edge.backends.tvm.packing.blocks.q4_0 import split
from edge.formats.blocks import IQ4_NL

BLOCK = IntegerBlock("IQ4_NL", values=32, raw_bytes=18, planes=(4,), signed=True, codebook=IQ4_NL, split=split)
