"""Configurations of the golden models beyond plain Llama: one for every formula that an engine must know.

Sizes are as small as shows a mistake: windows are shorter than the texts, caps are low enough to bend the scores, and
every RoPE scaling moves the frequencies of 8 pairs (6 where a head turns in part), each in its own way.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as hf
from write import bytes_vocabulary

WINDOW = 20  # positions that a token of a windowed layer sees; texts have 64

LLAMA3 = {  # with heads of 16, wavelengths 6 | 20, 63 | 199 and up: kept | blended | divided by 8
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Pair 0 of a head of 16 is kept, pairs 3 and up (5 if 1024 positions are original) divided; all are stretched by 1.14.
# Its `beta_fast` and `beta_slow` stay what they usually are: llama.cpp reads them for two architectures only.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
LONGROPE = {  # short factors up to position 255, long ones where the KV cache has more rows
    "rope_type": "longrope",
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
    "long_factor": [1.1, 1.3, 1.9, 2.6, 4.5, 8.0],
    "partial_rotary_factor": 0.75,
}


# Pair 0 of a head of 16 is kept, pairs 4 and up are divided (2 and up with the usual betas). Queries from position 24
# on have a temperature of 1.21, from position 48 on of 1.33.
MINISTRAL = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 3.0, "beta_slow": 0.1,
    "mscale": 1.0, "mscale_all_dim": 0.7, "llama_4_scaling_beta": 0.3,
}  # fmt: skip
TINY: dict[str, Any] = {"hidden": 16, "heads": 2, "kv_heads": 1, "ffn": 16, "head_dim": 16}
WIDE = TINY | {"hidden": 32}  # llama.cpp takes no other width for these than that of all heads
HALF = {"partial_rotary_factor": 0.5}


def small(
    kind: type[hf.PreTrainedConfig],
    layers: int = 2,
    hidden: int = 32,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int = 48,
    rope: dict[str, Any] | None = None,
    theta: float = 10_000.0,
    **others: Any,
) -> hf.PreTrainedConfig:
    options = {
        "vocab_size": len(bytes_vocabulary()), "hidden_size": hidden, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})}, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 2, "attn_implementation": "eager", "dtype": torch.float32,
    }  # fmt: skip
    return kind(**(options | others))


def _gemma3(full: dict[str, Any], layers: int, local_theta: float) -> hf.PreTrainedConfig:
    """The sixth layer sees everything, the others a window."""
    rope = {
        "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6, **full},
    }
    return small(
        hf.Gemma3TextConfig, layers=layers, kv_heads=1, ffn=32, head_dim=16, query_pre_attn_scalar=16,
        sliding_window=WINDOW, rope_parameters=rope,
    )  # fmt: skip


def configurations() -> dict[str, hf.PreTrainedConfig]:
    """By the name of the golden file."""
    return {
        "llama-linear": small(hf.LlamaConfig, head_dim=16, rope={"rope_type": "linear", "factor": 4.0}),
        "llama-yarn": small(hf.LlamaConfig, head_dim=16, rope=YARN),
        "llama-llama3": small(hf.LlamaConfig, head_dim=16, rope=LLAMA3, theta=1e5, tie_word_embeddings=False),
        "llama-window": small(hf.MistralConfig, head_dim=16, sliding_window=WINDOW),
        "qwen2": small(hf.Qwen2Config, theta=1e6),
        "qwen2-untied": small(hf.Qwen2Config, hidden=48, heads=6, tie_word_embeddings=False, theta=1e6),
        "qwen2-yarn": small(
            hf.Qwen2Config, heads=2, kv_heads=1, max_position_embeddings=4096,
            rope=YARN | {"original_max_position_embeddings": 1024},
        ),
        "qwen3": small(hf.Qwen3Config, head_dim=16, theta=1e6),
        "gemma2": small(
            hf.Gemma2Config, layers=4, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW,
            attn_logit_softcapping=2.0, final_logit_softcapping=5.0,
        ),
        "gemma3": _gemma3({}, layers=7, local_theta=10_000.0),
        "gemma3-linear": _gemma3({"rope_type": "linear", "factor": 8.0}, layers=6, local_theta=5_000.0),
        "phi3": small(hf.Phi3Config, layers=3, heads=2, kv_heads=2, tie_word_embeddings=False),
        "phi3-longrope": small(
            hf.Phi3Config, heads=2, kv_heads=1, rope=LONGROPE, max_position_embeddings=1024,
            original_max_position_embeddings=256,
        ),
        "gpt2": hf.GPT2Config(
            vocab_size=len(bytes_vocabulary()), n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=1,
            eos_token_id=2, attn_implementation="eager", dtype=torch.float32,
        ),
        "granite": small(
            hf.GraniteConfig, **TINY, attention_multiplier=0.1, embedding_multiplier=1.7,
            residual_multiplier=0.4, logits_scaling=0.6,
        ),
        "smollm3": small(hf.SmolLM3Config, layers=5, **TINY, theta=2e6),
        "mistral3": small(hf.Ministral3Config, **TINY, rope=MINISTRAL),
        "ernie4_5": small(hf.Ernie4_5Config, **TINY, theta=5e5),
        "gemma": small(hf.GemmaConfig, **TINY),
        "stablelm": small(
            hf.StableLmConfig, **TINY | {"heads": 1}, rope={"partial_rotary_factor": 0.5}, use_qkv_bias=True,
            layer_norm_eps=1e-5, tie_word_embeddings=False,
        ),
        "arcee": small(hf.ArceeConfig, **TINY, tie_word_embeddings=False),
        "chatglm": small(hf.GlmConfig, **WIDE, rope=HALF, attention_bias=True, tie_word_embeddings=False),
        "glm4": small(hf.Glm4Config, **TINY, rope=HALF, tie_word_embeddings=False),
        "starcoder2": small(hf.Starcoder2Config, **WIDE, use_bias=True, norm_epsilon=1e-5, sliding_window=None),
        "nemotron": small(hf.NemotronConfig, **WIDE, rope=HALF, norm_eps=1e-5, tie_word_embeddings=False),
        "seed_oss": small(
            hf.SeedOssConfig, **TINY, attention_bias=True, attention_out_bias=False, tie_word_embeddings=False
        ),
        "exaone4": small(hf.Exaone4Config, **WIDE, sliding_window=None, layer_types=["full_attention"] * 2),
        "cohere2": small(
            hf.Cohere2Config, layers=4, **WIDE, sliding_window=WINDOW, layer_norm_eps=1e-5, logit_scale=0.4
        ),
    }  # fmt: skip
