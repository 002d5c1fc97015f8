"""MiniCPM3: multi-head latent attention, whose RoPE pairs halves, with MiniCPM's factors."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.deepseek2 import latent_attention
from edge.model.architectures.minicpm import factors
from edge.model.cores import Dense
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    found, dense = factors(header, spec), Dense(header.count("feed_forward_length", "ffn"))
    attention = latent_attention(header, spec, halves=True)
    layer = Block("attn_norm", attention, None, found.residual), Block("ffn_norm", dense, None, found.residual)
    return Network(
        spec.hidden, spec.vocab, (layer,) * spec.layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head,
        embedding_scale=found.embedding, logit_scale=found.logits,
    )  # fmt: skip
