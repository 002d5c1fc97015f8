"""Qwen3.5 (huggingface.co/Qwen): three layers of gated delta nets for each layer of attention with an output gate.

Heads are normalized, and RoPE rotates a part of each head. The norm before the feed-forward network is named after the
attention. Positions have three components, which are equal for text (M-RoPE, interleaved).
"""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_rope, read_sections, read_state
from edge.model.cores import Attention, DeltaNet, Dense, Experts
from edge.model.structure.fallback import per_layer
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return hybrid(header, spec, Dense(header.count("feed_forward_length", "ffn")))


def hybrid(header: Header, spec: ModelSpec, feeding: Dense | Experts) -> Network:
    """Layers of delta nets or attention, each followed by `feeding`."""
    rope = replace(read_rope(header, spec), halves=True, sections=read_sections(header, spec), interleaved=True)
    attention = Attention(
        spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5, rope, head_norms=True, gated=True
    )
    delta, recurrent = DeltaNet(*read_state(header, "a delta net")), _recurrent(header, spec.layers)
    layers = tuple(
        (Block("attn_norm", delta if is_delta else attention), Block("post_attention_norm", feeding))
        for is_delta in recurrent
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)


def _recurrent(header: Header, layers: int) -> list[bool]:
    """Whether each layer is a delta net, by llama.cpp's rule: flags of the header, or all layers but every n-th."""
    if f"{header.architecture}.attention.recurrent_layers" in header.file.metadata:
        return [bool(flag) for flag in per_layer(header, "attention.recurrent_layers", "layers", layers, 0)]
    interval = header.count("full_attention_interval", "layers", default=4)
    return [(layer + 1) % interval != 0 for layer in range(layers)]
