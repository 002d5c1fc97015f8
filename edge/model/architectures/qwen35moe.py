"""Qwen3.5's mixtures, such as 35B-A3B: Qwen3.5 with experts and a shared expert in every layer."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_experts
from edge.model.architectures.qwen35 import hybrid
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return hybrid(header, spec, read_experts(header, shared=True))
