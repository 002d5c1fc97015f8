"""Llama, Mistral, SmolLM and their kin (arXiv:2302.13971). Conversion to GGUF makes RoPE's pairs neighbours."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge.architectures.recipe import Recipe, read_rope, same_window
from edge.header import Header

if TYPE_CHECKING:
    from edge.model import ModelSpec


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return Recipe((read_rope(header, spec),), same_window(spec), query_scale=spec.head_dim**-0.5)
