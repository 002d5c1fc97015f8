"""Gemma (arXiv:2403.08295): GeGLU, scaled embeddings. RoPE pairs halves."""

from __future__ import annotations

import math
from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import qwen2
from edge.model.spec import ModelSpec, Recipe


def recipe(header: Header, spec: ModelSpec) -> Recipe:
    return replace(qwen2.recipe(header, spec), activation="gelu", embedding_scale=math.sqrt(spec.hidden))
