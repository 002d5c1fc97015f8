"""Nemotron-H (arXiv:2504.03624): layers of one block each: Mamba-2, attention without RoPE, or an ungated feed-forward
network with ReLU².

A layer without KV heads and without a feed-forward network is Mamba-2.
"""

from __future__ import annotations

from edge.errors import UnsupportedError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_mamba
from edge.model.cores import Attention, Core, Dense
from edge.model.structure.fallback import per_layer
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    if spec.experts:
        raise UnsupportedError(f"{header.file.path}: Nemotron-H with experts runs on llama.cpp only")
    attention = Attention(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5)
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, spec.heads)
    widths = per_layer(header, "feed_forward_length", "ffn", spec.layers, 0)
    mamba = read_mamba(header)

    def core(heads: int, width: int) -> Core:
        return Dense(width, "relu2", gated=False) if width else attention if heads else mamba

    layers = tuple((Block("attn_norm", core(*each)),) for each in zip(kv_heads, widths, strict=True))
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)
