"""Ministral 3 (arXiv:2601.08584): Llama with YaRN, and queries scaled up with their position.

Mistral Small 3 has the same name in GGUF, but no YaRN and no scaling.
"""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder, read_factor, read_rope
from edge.model.layers import Network, Temperature
from edge.model.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    rope = read_rope(header, spec)
    rope = replace(
        rope,
        beta_fast=header.positive("rope.scaling.yarn_beta_fast", rope.beta_fast, below=1e6),
        beta_slow=header.positive("rope.scaling.yarn_beta_slow", rope.beta_slow, below=1e6),
        log_multiplier=read_factor(header, "rope.scaling.yarn_log_multiplier", 0.0),
    )
    slope = read_factor(header, "attention.temperature_scale", 0.0)
    temperature = Temperature(slope, rope.original_context) if slope else None
    return decoder(header, spec, ropes=[rope] * spec.layers, temperature=temperature)
