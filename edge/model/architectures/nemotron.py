"""Nemotron 4 and Minitron (arXiv:2402.16819, arXiv:2407.14679): LayerNorm, RoPE for a part of each head, ReLU² without
a gate. Files hold the weights of norms with the 1 that transformers adds."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return decoder(header, spec, halves=True, norm="layer", gated=False, activation="relu2")
