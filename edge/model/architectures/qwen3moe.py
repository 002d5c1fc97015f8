"""Qwen3's mixtures (arXiv:2505.09388), such as 30B-A3B: Qwen3 with experts in every layer."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_experts
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, halves=True, experts=read_experts(header))
