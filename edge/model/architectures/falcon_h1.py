"""Falcon-H1 (arXiv:2507.22448): attention and Mamba-2 side by side in each layer. Its multipliers are part of the
file's weights."""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_mamba, read_rope
from edge.model.cores import Attention, Dense
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    rope = replace(read_rope(header, spec), halves=True)
    attention = Attention(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5, rope)
    mamba = replace(read_mamba(header), normed="blk.0.ssm_norm.weight" in header.file.tensors)
    dense = Dense(header.count("feed_forward_length", "ffn"))
    layer = (Block("attn_norm", attention), Block("attn_norm", mamba, beside=True), Block("ffn_norm", dense))
    return Network(spec.hidden, spec.vocab, (layer,) * spec.layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)
