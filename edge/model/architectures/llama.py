"""Llama, Mistral, SmolLM and relatives (arXiv:2302.13971). GGUF stores the two values of a RoPE pair side by side."""

from edge.model.architectures.common import decoder as network

__all__ = ["network"]
