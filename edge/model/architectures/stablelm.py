"""StableLM 2 (arXiv:2402.17834): LayerNorm, RoPE for a part of each head, biases on queries, keys and values."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import qwen2
from edge.model.spec import ModelSpec, Recipe


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return replace(qwen2.recipe(header, spec), norm="layer")
