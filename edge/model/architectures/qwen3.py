"""Qwen3 (arXiv:2505.09388): every head's queries and keys are normalised before RoPE; no biases."""

from __future__ import annotations

from edge.model.architectures.qwen2 import recipe

__all__ = ["recipe"]
