"""Kimi-Linear (arXiv:2510.26692): Kimi Delta Attention, and latent attention without RoPE in the layers with KV heads.

The leading layers have a dense feed-forward network, the others experts and a shared one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_kernel
from edge.model.architectures.deepseek2 import feed_forward, latent_attention
from edge.model.cores import KimiDelta
from edge.model.fallback import per_layer
from edge.model.layers import Block, Network
from edge.model.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    attention = latent_attention(header, spec)
    still = replace(attention.rope, scaling="linear", factor=math.inf)  # no position rotates anything
    attention = replace(attention, rope=still)
    size = header.count("kda.head_dim", "head_dim")
    delta = KimiDelta(spec.heads, size, read_kernel(header, "ssm.conv_kernel"), rank=size)
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, 0)
    layers = tuple(
        (Block("attn_norm", attention if heads else delta), Block("ffn_norm", feeding))
        for heads, feeding in zip(kv_heads, feed_forward(header, spec), strict=True)
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)
