"""MiniCPM3: multi-head latent attention, whose heads' matrices GGUF has in one, and factors that it does not state."""

from __future__ import annotations

from edge.converters.huggingface.architectures.common import (
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Count, Fixed, changed
from edge.converters.huggingface.config import Config
from edge.formats.gguf_writer import Field

_ORIGINAL = "original_max_position_embeddings"


def _query(config: Config) -> int:
    return config.count("qk_nope_head_dim", "head_dim") + config.count("qk_rope_head_dim", "head_dim")


def _value(config: Config) -> int:
    return max(1, config.count("hidden_size", "hidden") // config.count("num_attention_heads", "heads"))


def _rope(config: Config) -> Config:
    """LongRoPE's original context stands beside its factors. RoPE rotates the last values of a head."""
    said = config.get("rope_parameters", config.get("rope_scaling"))
    original = said.get(_ORIGINAL) if isinstance(said, dict) else None
    if config.get(_ORIGINAL) is None and original is not None:
        config = Config(config.path, {**config.values, _ORIGINAL: original})
    rope = read_rope(config, ("default", "longrope"))
    share = config.count("qk_rope_head_dim", "head_dim") / _query(config)
    return Config(rope.path, {**rope.values, "partial_rotary_factor": share})


def _others(config: Config, _sizes: Sizes) -> dict[str, Field]:
    return {"attention.kv_lora_rank": Count("kv_lora_rank", (), "head_dim").field(config)}


MINICPM3 = Architecture(
    name="minicpm3",
    settings=(
        *changed([each for each in USUAL if each.theirs != "head_dim"], rms_norm_eps=1e-5),
        SILU,
        Count("q_lora_rank", ("attention.q_lora_rank",), "hidden"),
        Count("", ("attention.key_length",), "head_dim", _query),
        Count("v_head_dim", ("attention.value_length",), "head_dim", _value),
        Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
        Fixed("scale_emb", 12),
        Fixed("scale_depth", 1.4),
        Fixed("dim_model_base", 256),
    ),
    names=without(LLAMA_NAMES, "attn_q", "attn_k", "attn_v")
    | in_layers(
        {
            "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
        }
    ),
    others=_others,
    rope=_rope,
    partial_rope=True,
    tied=True,
)  # fmt: skip
