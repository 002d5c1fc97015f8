"""Granite 4 hybrids (github.com/ibm-granite): Granite with Mamba-2 in most layers, which have no KV heads.

A dense network follows in each layer, or experts with an ungated shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures import granite
from edge.model.architectures.common import read_experts, read_mamba
from edge.model.structure.fallback import figure, per_layer
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    alike, mamba = granite.network(header, spec), read_mamba(header)
    if spec.experts:
        width = header.count("feed_forward_length", "ffn")
        shared = figure(header, "expert_shared_feed_forward_length", "ffn", 0)
        experts = replace(read_experts(header, width=width), shared=shared, shared_gated=False)
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, spec.heads)
    layers = tuple(
        (
            mixing if heads else replace(mixing, core=mamba),
            replace(feeding, core=experts) if spec.experts else feeding,
        )
        for heads, (mixing, feeding) in zip(kv_heads, alike.layers, strict=True)
    )
    return replace(alike, layers=layers)
