"""LFM2 and LFM2.5 (arXiv:2511.23404): short convolutions in most layers, attention with norms of heads in the others.

The final norm has the name of an embedding norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_kernel, read_rope
from edge.model.cores import Attention, Dense, Experts, ShortConvolution
from edge.model.structure.fallback import per_layer
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    return hybrid(header, spec, [Dense(header.count("feed_forward_length", "ffn"))] * spec.layers)


def hybrid(header: Header, spec: ModelSpec, feeding: Sequence[Dense | Experts]) -> Network:
    """Layers of convolutions or attention, each followed by its element of `feeding`."""
    rope = replace(read_rope(header, spec), halves=True)
    attention = Attention(spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5, rope, head_norms=True)
    convolution = ShortConvolution(spec.hidden, read_kernel(header, "shortconv.l_cache"))
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, spec.heads)  # 0: no attention
    layers = tuple(
        (Block("attn_norm", attention if heads else convolution), Block("ffn_norm", core))
        for heads, core in zip(kv_heads, feeding, strict=True)
    )
    return Network(
        spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, output_norm="token_embd_norm", tied_head=spec.tied_head
    )
