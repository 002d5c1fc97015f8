"""Qwen3.5 (huggingface.co/Qwen): three layers of gated delta nets for each layer of attention with an output gate.

Heads are normalized, and RoPE rotates a part of each head. The norm before the feed-forward network is named after the
attention. MRoPE's sections agree for text, so positions are plain.
"""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_kernel, read_rope
from edge.model.layers import Attention, Block, DeltaNet, Dense, Network
from edge.model.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    if header.value("nextn_predict_layers"):
        raise UnsupportedError(f"{header.file.path}: layers that predict several tokens run on llama.cpp only")
    rope = replace(read_rope(header, spec), halves=True)
    attention = Attention(
        spec.heads, spec.kv_heads, spec.head_dim, spec.head_dim**-0.5, rope, head_norms=True, gated=True
    )
    delta = _delta_net(header)
    feeding = Block("post_attention_norm", Dense(header.count("feed_forward_length", "ffn")))
    layers = tuple(
        (Block("attn_norm", delta if _is_recurrent(header, layer) else attention), feeding)
        for layer in range(spec.layers)
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)


def _is_recurrent(header: Header, layer: int) -> bool:
    return f"blk.{layer}.ssm_a" in header.file.tensors


def _delta_net(header: Header) -> DeltaNet:
    heads, inner = header.count("ssm.time_step_rank", "heads"), header.count("ssm.inner_size", "ffn")
    key_heads = header.count("ssm.group_count", "heads")
    if inner % heads or heads % key_heads:
        raise ModelFormatError(
            f"{header.file.path}: {inner} values in {heads} heads of a delta net with {key_heads} key heads"
        )
    size = header.count("ssm.state_size", "head_dim")
    return DeltaNet(heads, key_heads, size, inner // heads, read_kernel(header, "ssm.conv_kernel"))
