"""Llama, Mistral, SmolLM and their kin (arXiv:2302.13971). Conversion to GGUF makes RoPE's pairs neighbours."""

from __future__ import annotations

from edge.architectures.common import read_rope, same_window
from edge.header import Header
from edge.spec import ModelSpec, Recipe


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return Recipe((read_rope(header, spec),), same_window(spec), query_scale=spec.head_dim**-0.5)
