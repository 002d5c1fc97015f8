"""Gemma (arXiv:2403.08295): GeGLU, scaled embeddings. RoPE pairs halves."""

from __future__ import annotations

import math

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, halves=True, activation="gelu", embedding_scale=math.sqrt(spec.hidden))
