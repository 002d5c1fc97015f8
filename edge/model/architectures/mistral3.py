"""Ministral 3 (arXiv:2601.08584): Llama with YaRN, and queries scaled up with their position.

Mistral Small 3 has the same name in GGUF, but no YaRN and no scaling.
"""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_factor, read_yarn
from edge.model.cores import Temperature
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    rope = read_yarn(header, spec)
    slope = read_factor(header, "attention.temperature_scale", 0.0)
    temperature = Temperature(slope, rope.original_context) if slope else None
    return decoder(header, spec, ropes=[rope] * spec.layers, temperature=temperature)
