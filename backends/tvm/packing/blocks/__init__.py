"""Block types of GGUF that the native engine reads: one file each, and a line here."""

from __future__ import annotations

from edge.backends.tvm.packing.blocks import (
    bf16,
    f16,
    f32,
    iq4_nl,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
)
from edge.backends.tvm.packing.blocks.base import Block

_FILES = (bf16, f16, f32, iq4_nl, q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q5_1, q5_k, q6_k, q8_0)

BLOCKS: dict[str, Block] = {each.BLOCK.name: each.BLOCK for each in _FILES}
