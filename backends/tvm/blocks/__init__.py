"""Block types of GGUF that the native engine reads: one file each, and a line here."""

from __future__ import annotations

from edge.backends.tvm.blocks import bf16, f16, f32, q4_0, q4_1, q8_0
from edge.backends.tvm.blocks.base import Block

BLOCKS: dict[str, Block] = {
    block.name: block for block in (q4_0.BLOCK, q4_1.BLOCK, q8_0.BLOCK, f16.BLOCK, bf16.BLOCK, f32.BLOCK)
}
