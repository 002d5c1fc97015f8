"""Phi-3 and Phi-4-mini (arXiv:2404.14219): one matrix for queries, keys and values, one for gate and up.

RoPE's frequencies are divided by factors from the file: `rope_factors_short` within the original context,
`rope_factors_long` beyond it.
"""

from edge.model.architectures.qwen2 import network

__all__ = ["network"]
