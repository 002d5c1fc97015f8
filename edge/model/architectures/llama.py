"""Llama, Mistral, SmolLM and relatives (arXiv:2302.13971). Converters to GGUF make RoPE's pairs neighbours."""

from edge.model.architectures.common import decoder as network

__all__ = ["network"]
