"""gpt-oss (arXiv:2508.10925): experts in every layer, sinks in attention, a window in every other layer, biases, YaRN.

The norm before the experts is named after the attention.
"""

from __future__ import annotations

from dataclasses import replace

from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_experts, read_yarn, window_but_every
from edge.model.cores import Attention
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

_BIASED = ("attn_q", "attn_k", "attn_v", "attn_output")
_CLAMP = 7.0  # of the activations' inputs; no field of the file says so


def network(header: Header, spec: ModelSpec) -> Network:
    rope = replace(read_yarn(header, spec), halves=True)
    attention = Attention(
        spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5, rope, biases=_BIASED, sinks=True
    )
    feeding = Block("post_attention_norm", replace(read_experts(header), clamp=_CLAMP, biases=True))
    layers = tuple(
        (Block("attn_norm", replace(attention, window=window)), feeding) for window in window_but_every(2, spec)
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)
