"""Llama, Mistral, SmolLM and relatives (arXiv:2302.13971). Converters to GGUF make RoPE's pairs neighbours."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_rope, same_window
from edge.model.spec import ModelSpec, Recipe


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return Recipe((read_rope(header, spec),), same_window(spec), query_scale=spec.head_dim**-0.5)
