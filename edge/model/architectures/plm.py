"""PLM (arXiv:2503.12167): multi-head latent attention, and feed-forward networks of squared ReLU without a gate."""

from __future__ import annotations

from edge.formats.gguf_fields import Header
from edge.model.architectures.deepseek2 import latent_attention
from edge.model.cores import Dense
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    dense = Dense(header.count("feed_forward_length", "ffn"), "relu2", gated=False)
    layer = Block("attn_norm", latent_attention(header, spec)), Block("ffn_norm", dense)
    layers = (layer,) * spec.layers
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)
