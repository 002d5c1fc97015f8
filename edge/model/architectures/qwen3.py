"""Qwen3 (arXiv:2505.09388): every head's queries and keys are normalized before RoPE; no biases."""

from edge.model.architectures.qwen2 import network

__all__ = ["network"]
