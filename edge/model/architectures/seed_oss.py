"""Seed-OSS (huggingface.co/ByteDance-Seed): Llama with biases, whose RoPE pairs halves. Files name the norm before the
feed-forward network after the attention."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import decoder
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    usual = decoder(header, spec, halves=True)
    layers = tuple(
        (replace(attention, post_norm=None), replace(feeding, norm="post_attention_norm"))
        for attention, feeding in usual.layers
    )
    return replace(usual, layers=layers)
