"""Qwen2 and Qwen2.5 (arXiv:2407.10671): Llama with biases on queries, keys and values; RoPE pairs halves."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, halves=True)
