"""StableLM 2 (arXiv:2402.17834): LayerNorm, RoPE for a part of each head, biases on queries, keys and values."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, halves=True, norm="layer")
