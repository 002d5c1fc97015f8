"""Phi-3 and Phi-4-mini (arXiv:2404.14219): one matrix for queries, keys and values, one for gate and up.

Long contexts divide RoPE's frequencies by factors in the file, `rope_factors_long`; within the original context
`rope_factors_short` apply.
"""

from __future__ import annotations

from edge.model.architectures.qwen2 import recipe

__all__ = ["recipe"]
