"""Seed-OSS: Llama with biases; GGUF names the norm before the feed-forward network after the attention."""

from __future__ import annotations

from functools import partial

from edge.converters.huggingface.architectures.common import FFN_BIASES, LLAMA_NAMES, Architecture, in_layers, without
from edge.converters.huggingface.architectures.rope import read_rope

SEED_OSS = Architecture(
    name="seed_oss",
    model=("seed_oss", "SeedOssForCausalLM"),
    names=without(LLAMA_NAMES, "ffn_norm") | in_layers({"post_attention_norm": "post_attention_layernorm"}),
    maybe_biases={
        "attention_bias": frozenset(("attn_q", "attn_k", "attn_v")),
        "attention_out_bias": frozenset(("attn_output",)),
        "mlp_bias": FFN_BIASES,
    },
    rope=partial(read_rope, scalings=("default", "linear", "yarn")),
)
