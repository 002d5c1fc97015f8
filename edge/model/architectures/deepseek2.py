"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): DeepSeek-V2-Lite, Youtu-LLM, Moonlight, GLM-4.7-Flash.

The leading layers, or all, have a dense feed-forward network, the others experts and a shared one.
"""

from __future__ import annotations

from dataclasses import replace

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_fields import Header
from edge.model.architectures.angles import yarn_magnitude
from edge.model.architectures.common import leading_dense, read_experts, read_yarn
from edge.model.cores import Attention, Dense, Experts, Latent
from edge.model.structure.layers import Block, Network
from edge.model.structure.spec import ModelSpec

_SOFTMAX, _SIGMOID = 1, 2  # llama.cpp's numbers of routers


def network(header: Header, spec: ModelSpec) -> Network:
    attention = latent_attention(header, spec)
    layers = tuple(
        (Block("attn_norm", attention), Block("ffn_norm", feeding)) for feeding in feed_forward(header, spec)
    )
    return Network(spec.hidden, spec.vocab, layers, norm_eps=spec.norm_eps, tied_head=spec.tied_head)


def feed_forward(header: Header, spec: ModelSpec) -> list[Dense | Experts]:
    """The feed-forward network of each layer."""
    dense = Dense(header.count("feed_forward_length", "ffn"))
    experts, leading = (_experts(header), leading_dense(header)) if spec.experts else (dense, spec.layers)
    return [dense if layer < leading else experts for layer in range(spec.layers)]


def latent_attention(header: Header, spec: ModelSpec, *, halves: bool = False) -> Attention:
    """halves: see `Rope`. Raises ModelFormatError for impossible figures.

    Files of April 2025 and later describe rows of the cache; earlier ones, and those of architectures that llama.cpp
    runs in expanded form, the heads' own keys and values, in one matrix, `attn_kv_b`.
    """
    rank, rope = header.count("attention.kv_lora_rank", "head_dim"), replace(read_yarn(header, spec), halves=halves)
    apart = "_mla" if header.value("attention.key_length_mla") is not None else ""
    query = header.count(f"attention.key_length{apart}", "head_dim")
    value = header.count(f"attention.value_length{apart}", "head_dim", default=spec.hidden // spec.heads)
    if query <= rope.dim or (apart and (spec.kv_heads != 1 or spec.head_dim != rank + rope.dim)):
        raise ModelFormatError(
            f"{header.file.path}: rows of {spec.head_dim} values in {spec.kv_heads} heads, of which {rank} are a "
            f"latent vector and {rope.dim} are rotated, for queries of {query}"
        )
    ranked = header.value("attention.q_lora_rank") not in (None, 0)
    latent = Latent(
        query - rope.dim,
        value,
        header.count("attention.q_lora_rank", "hidden") if ranked else 0,
        joined=not apart,
    )
    # yarn's magnitude applies to whole queries and keys, not to cosines and sines; files have a tenth of its multiplier
    magnitude = yarn_magnitude(rope.factor, 10 * rope.log_multiplier) if rope.scaling == "yarn" else 1.0
    scale, rope = magnitude**2 * query**-0.5, replace(rope, first=rank, log_multiplier=1.0)
    return Attention(spec.heads, 1, rank + rope.dim, scale, rope, value_dim=rank, shared_values=True, latent=latent)


def _experts(header: Header) -> Experts:
    """Raises UnsupportedError for other routers."""
    router = header.value("expert_gating_func") or _SOFTMAX
    if router not in (_SOFTMAX, _SIGMOID):
        raise UnsupportedError(f"{header.file.path}: experts that are chosen by router {router} run on llama.cpp only")
    found = read_experts(header, "sigmoid" if router == _SIGMOID else "softmax")
    shared = header.count("expert_shared_count", "heads") if header.value("expert_shared_count") else 0
    biased = router == _SIGMOID and any(name.endswith("exp_probs_b.bias") for name in header.file.tensors)
    normed = bool(header.value("expert_weights_norm"))
    return replace(found, normed=normed, shared=shared * found.ffn, shared_gated=False, choice_bias=biased)
