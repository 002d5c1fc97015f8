"""Kimi-Linear (arXiv:2510.26692) and Ling 3: Kimi Delta Attention, and latent attention in the layers with KV heads.

The leading layers have a dense feed-forward network, the others experts and a shared one. Kimi-Linear's latent
attention rotates nothing; Ling's has gates, and Ling's Kimi Delta Attention bounded decays.
"""

from __future__ import annotations

import math
from dataclasses import replace

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import ArrayRef
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_kernel
from edge.model.architectures.deepseek2 import feed_forward, latent_attention
from edge.model.cores import Attention, KimiDelta
from edge.model.structure.fallback import per_layer
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec


def network(header: Header, spec: ModelSpec) -> Network:
    attention, delta = latent_attention(header, spec), _delta(header, spec)
    still = replace(attention.rope, scaling="linear", factor=math.inf)  # no position rotates anything
    return _hybrid(header, spec, replace(attention, rope=still), replace(delta, rank=delta.size))


def ling(header: Header, spec: ModelSpec) -> Network:
    """Raises UnsupportedError for decays without a bound and clamped experts, which no small model has."""
    attention, bound = latent_attention(header, spec), header.value("kda.gate_lower_bound")
    if not isinstance(bound, float) or not -1e3 < bound < 0:
        raise ModelFormatError(f"{header.file.path}: kda.gate_lower_bound is {bound!r}: it must be below 0")
    if header.value("kda.safe_gate") is False:
        raise UnsupportedError(f"{header.file.path}: decays without a bound run on no engine")
    for name in (f"{header.architecture}.swiglu_clamp_{which}" for which in ("exp", "shexp")):
        if isinstance(header.file.metadata.get(name), ArrayRef) and header.file.numbers(name).any():
            raise UnsupportedError(f"{header.file.path}: clamped experts run on llama.cpp only")
    assert attention.latent
    gated = replace(attention, latent=replace(attention.latent, gated=True))
    return _hybrid(header, spec, gated, replace(_delta(header, spec), bound=bound))


def _delta(header: Header, spec: ModelSpec) -> KimiDelta:
    size = header.count("kda.head_dim", "head_dim")
    return KimiDelta(spec.heads, size, read_kernel(header, "ssm.conv_kernel"), rank=0)


def _hybrid(header: Header, spec: ModelSpec, attention: Attention, delta: KimiDelta) -> Network:
    kv_heads = per_layer(header, "attention.head_count_kv", "heads", spec.layers, 0)
    layers = tuple(
        (Block("attn_norm", attention if heads else delta), Block("ffn_norm", feeding))
        for heads, feeding in zip(kv_heads, feed_forward(header, spec), strict=True)
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)
