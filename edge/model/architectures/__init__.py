"""Architectures: each has a line here and a module, which is imported only for its models."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

from edge.errors import UnsupportedError
from edge.formats.gguf_fields import Header
from edge.model.architectures.common import read_pooling
from edge.model.structure.layers import RANKS, Network, is_behind
from edge.model.structure.spec import ModelSpec
from edge.values import brief

_NETWORKS = {
    "llama": "llama:network",
    "ernie4_5": "llama:network",  # Baidu's ERNIE 4.5 has no formula of its own
    "qwen2": "qwen2:network",
    "qwen2vl": "qwen2vl:network",
    "qwen3": "qwen3:network",
    "qwen3moe": "qwen3moe:network",
    "qwen3vl": "qwen3vl:network",
    "qwen35": "qwen35:network",
    "qwen35moe": "qwen35moe:network",
    "gemma": "gemma:network",
    "gemma2": "gemma2:network",
    "gemma3": "gemma3:network",
    "gemma4": "gemma4:network",
    "gemma4-assistant": "gemma4:assistant",
    "eagle3": "eagle3:network",
    "phi3": "phi3:network",
    "gpt2": "gpt2:network",
    "gpt-oss": "gpt_oss:network",
    "granite": "granite:network",
    "granitehybrid": "granitehybrid:network",
    "falcon-h1": "falcon_h1:network",
    "jamba": "mamba:jamba",
    "kimi-linear": "kimi_linear:network",
    "bailingmoe3": "kimi_linear:ling",
    "lfm2": "lfm2:network",
    "lfm2moe": "lfm2moe:network",
    "mamba": "mamba:network",
    "mistral3": "mistral3:network",
    "nemotron_h": "nemotron_h:network",
    "minicpm": "minicpm:network",
    "minicpm3": "minicpm3:network",
    "plm": "plm:network",
    "smollm3": "smollm3:network",
    "stablelm": "stablelm:network",
    "arcee": "arcee:network",
    "chatglm": "llama:network",  # GLM 4 of 2024 and GLM-Edge, whose RoPE rotates a part of each head
    "cohere2": "cohere2:network",
    "deepseek2": "deepseek2:network",
    "exaone": "qwen2:network",  # EXAONE 3 is Llama whose RoPE pairs halves
    "exaone4": "exaone4:network",
    "glm4": "llama:network",  # GLM 4 of 2025, with norms before and after each block
    "internlm2": "llama:network",
    "nemotron": "nemotron:network",
    "seed_oss": "seed_oss:network",
    "starcoder2": "starcoder2:network",
    "bert": "bert:bert",
    "nomic-bert": "bert:nomic_bert",
    "modern-bert": "modern_bert:network",
    "gemma-embedding": "gemma_embedding:network",
}

_ALIBI = "ALiBi's positions"
LACKING = {
    "apertus": "the activation xIELU",
    "baichuan": _ALIBI,
    "bitnet": "norms within attention and feed-forward network",
    "bloom": _ALIBI,
    "gemma3n": "AltUp's parallel hidden states",
    "hunyuan-dense": "norms of heads behind RoPE",
    "mpt": _ALIBI,
    "olmo2": "norms of whole rows of queries and keys",
    "olmoe": "norms of whole rows of queries and keys",
    "refact": _ALIBI,
    "rwkv6": "RWKV's state",
    "rwkv7": "RWKV's state",
}
"""What no core has, of architectures that llama.cpp alone runs. Those in neither table have no description yet."""

USUAL: dict[str, tuple[str, ...]] = {
    "chatglm": ("attn_q.bias", "attn_k.bias", "attn_v.bias", "ffn_up.weight"),
    "exaone4": ("attn_q_norm.weight", "post_attention_norm.weight", "post_ffw_norm.weight"),
    "gemma2": ("post_attention_norm.weight", "post_ffw_norm.weight"),
    "gemma3": ("attn_q_norm.weight", "post_attention_norm.weight", "post_ffw_norm.weight"),
    "glm4": (
        "attn_q.bias", "attn_k.bias", "attn_v.bias", "ffn_up.weight", "post_attention_norm.weight",
        "post_ffw_norm.weight",
    ),
    "phi3": ("attn_qkv.weight", "ffn_up.weight"),
    "qwen2": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen2vl": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
    "qwen3": ("attn_q_norm.weight",),
    "qwen3moe": ("attn_q_norm.weight",),
    "qwen3vl": ("attn_q_norm.weight",),
    "seed_oss": ("attn_q.bias", "attn_k.bias", "attn_v.bias"),
}  # fmt: skip
"""Tensors of the first layer that tell `find_network` what a header does not state. All files of these architectures
have them, so a model can be described without its file (`edge/model/layout.py`)."""

USUAL_EXPERTS = {
    "bailingmoe3": ("ffn_down_exps.weight", "exp_probs_b.bias"),
    "deepseek2": ("ffn_down_exps.weight", "exp_probs_b.bias"),
    "gemma4": ("ffn_gate_up_exps.weight", "ffn_down_exps.weight"),
    "kimi-linear": ("ffn_down_exps.weight", "exp_probs_b.bias"),
}
"""As `USUAL`, in mixtures of experts; those of other architectures are not fused."""


UNSTATED = ("jamba",)
"""Architectures whose headers do not say which layers of a mixture have experts."""


def find_network(header: Header, spec: ModelSpec) -> Network | None:
    """The model's description of layers; None for architectures that only llama.cpp runs."""
    if spec.architecture not in _NETWORKS:
        return None
    module, _, name = _NETWORKS[spec.architecture].partition(":")
    network: Network = getattr(import_module(f"{__name__}.{module}"), name)(header, spec)
    pooling = read_pooling(header)
    if header.value("pooling_type") == RANKS or any(map(is_behind, header.file.tensors)):
        from edge.model.structure.tail import describe, read_ranking  # here: few models have one

        ranking = read_ranking(header, encoder=network.encoder)
        network = replace(network, tail=describe(header, spec.hidden), ranks=ranking is not None)
        pooling = ranking or pooling
    if pooling is None and network.encoder:
        said = brief(header.value("pooling_type"))
        raise UnsupportedError(f"{header.file.path}: pooling {said} makes no embeddings")
    return replace(network, pooling=pooling or network.pooling)
