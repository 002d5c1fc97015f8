"""StarCoder 2 (arXiv:2402.19173): LayerNorm, biases everywhere, a feed-forward network without a gate."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, halves=True, norm="layer", gated=False, activation="gelu")
