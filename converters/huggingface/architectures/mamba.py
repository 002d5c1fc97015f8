"""Models with Mamba: Mamba-1 alone or in Jamba, Mamba-2 in Granite 4 and Nemotron-H. Checkpoints have log −a."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    INTERLEAVED,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
)
from edge.converters.huggingface.architectures.granite import FACTORS, GRANITE
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting, changed
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors, floats, split, stack_experts, without_middle
from edge.errors import ModelFormatError
from edge.formats.gguf_writer import Field

_MAMBA = ("mamba", "linear_attention")  # as publishers and as transformers name such layers
_FULL = ("attention", "full_attention")


def _inner(heads: str, size: str, config: Config) -> int:
    return config.count(heads, "heads") * config.count(size, "head_dim")


def _settings(heads: str, size: str, state: str, groups: str, kernel: str) -> tuple[Setting, ...]:
    """Settings of Mamba-2, by their keys in config.json."""
    return (
        Count(kernel, ("ssm.conv_kernel",), "head_dim", 4),
        Count(state, ("ssm.state_size",), "ffn", 128),
        Count(groups, ("ssm.group_count",), "heads", 1),
        Count(heads, ("ssm.time_step_rank",), "heads"),
        Count("", ("ssm.inner_size",), "ffn", partial(_inner, heads, size)),
        Fixed("mamba_proj_bias", False), Fixed("use_bias", False),
        Fixed("mamba_conv_bias", True), Fixed("use_conv_bias", True),
    )  # fmt: skip


def _kinds(config: Config, layers: int, key: str, known: Sequence[str]) -> list[str]:
    kinds = config.get(key)
    if not isinstance(kinds, list) or len(kinds) != layers or not set(map(str, kinds)) <= set(known):
        raise ModelFormatError(f"{config.path}: {key} must name {', '.join(known)} for each layer")
    return kinds


def has_mamba(config: Config) -> bool:
    kinds = config.get("layer_types")
    return isinstance(kinds, list) and not {*_MAMBA}.isdisjoint(map(str, kinds))


def _prepare(tensors: Tensors, config: Config) -> Tensors:
    found: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(".conv1d.weight"):
            tensor = without_middle(tensor)
        elif name.endswith(".A_log"):
            tensor = floats(tensor, lambda log: -np.exp(log))
        found[name] = tensor
    found = split(found, config, {"shared_mlp.input_linear": ("shared_mlp.gate", "shared_mlp.up")})
    apart = ("block_sparse_moe.gate", "block_sparse_moe.up")
    return split(found, config, {"block_sparse_moe.input_linear": apart}, axis=1)


def _names(mixer: str) -> dict[str, str]:
    parts = {"ssm_in": "in_proj", "ssm_conv1d": "conv1d", "ssm_norm": "norm", "ssm_out": "out_proj"}
    return in_layers({ours: f"{mixer}.{theirs}" for ours, theirs in parts.items()})


def _parameters(mixer: str) -> dict[str, str]:
    parts = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias"}
    return in_layers({ours: f"{mixer}.{theirs}" for ours, theirs in parts.items()})


def _granite(config: Config, sizes: Sizes) -> dict[str, Field]:
    kinds = _kinds(config, sizes.layers, "layer_types", (*_MAMBA, *_FULL))
    config.must_be("position_embedding_type", "rope", "nope")
    shared = np.uint32(config.count("shared_intermediate_size", "ffn", 1024))
    fields: dict[str, Field] = {
        "attention.head_count_kv": np.array([sizes.kv_heads if kind in _FULL else 0 for kind in kinds], np.int32),
        "rope.scaling.finetuned": config.get("position_embedding_type") == "rope",
        "expert_shared_feed_forward_length": shared,
    }
    if not config.get("num_local_experts", 8):
        return fields | {"feed_forward_length": shared}
    return fields | {
        "expert_count": np.uint32(config.count("num_local_experts", "ffn", 8)),
        "expert_used_count": np.uint32(config.count("num_experts_per_tok", "ffn", 2)),
    }


GRANITE_MAMBA = Architecture(
    name="granitehybrid",
    settings=(
        *USUAL, Fixed("hidden_act", "silu"), *FACTORS,
        *_settings("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    ),
    others=_granite,
    names=LLAMA_NAMES | _names("mamba") | in_layers(
        {
            "ffn_gate": "shared_mlp.gate", "ffn_up": "shared_mlp.up", "ffn_down": "shared_mlp.output_linear",
            "ffn_gate_shexp": "shared_mlp.gate", "ffn_up_shexp": "shared_mlp.up",
            "ffn_down_shexp": "shared_mlp.output_linear", "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": "block_sparse_moe.gate", "ffn_up_exps": "block_sparse_moe.up",
            "ffn_down_exps": "block_sparse_moe.output_linear",
        }
    ),
    parameters=_parameters("mamba"),
    layouts=INTERLEAVED,
    prepare=_prepare,
    biases=frozenset(("ssm_conv1d",)),
    maybe_biases={},
    rope=GRANITE.rope,
)  # fmt: skip


_PATTERN = {"M": "mamba", "*": "attention", "-": "mlp"}
_HEAD_DIM = 128


def _nemotron(config: Config, sizes: Sizes) -> dict[str, Field]:
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str) and config.get("layers_block_type") is None:
        said: Any = [_PATTERN.get(letter, letter) for letter in pattern]
        config = Config(config.path, {**config.values, "layers_block_type": said})
    kinds = _kinds(config, sizes.layers, "layers_block_type", (*_MAMBA, *_FULL, "mlp"))
    width = config.count("intermediate_size", "ffn")
    return {
        "attention.head_count_kv": np.array([sizes.kv_heads if kind in _FULL else 0 for kind in kinds], np.int32),
        "feed_forward_length": np.array([width if kind == "mlp" else 0 for kind in kinds], np.int32),
        "rope.scaling.finetuned": False,
    }


def _layers(config: Config) -> int:
    kinds = config.get("layers_block_type", config.get("hybrid_override_pattern"))
    return len(kinds) if isinstance(kinds, list | str) and kinds else config.count("num_hidden_layers", "layers")


NEMOTRON_H = Architecture(
    name="nemotron_h",
    settings=(
        *(replace(each, default=_layers) if isinstance(each, Count) and each.theirs == "num_hidden_layers" else each
          for each in changed(USUAL, head_dim=_HEAD_DIM) if each.theirs != "rms_norm_eps"),
        Number(
            "layer_norm_epsilon", ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), 1e-5
        ),
        *_settings("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),
        Fixed("mlp_hidden_act", "relu2"), Fixed("mamba_hidden_act", "silu"), Fixed("attention_bias", False),
        Fixed("mlp_bias", False),
    ),
    others=_nemotron,
    names={
        "token_embd": "embeddings",
        **in_layers(
            {
                "attn_norm": "norm", "attn_q": "mixer.q_proj", "attn_k": "mixer.k_proj", "attn_v": "mixer.v_proj",
                "attn_output": "mixer.o_proj", "ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj",
            }
        ),
        **_names("mixer"),
        "output_norm": "norm_f",
        "output": "lm_head",
    },
    parameters=_parameters("mixer"),
    root="backbone.",
    prepare=_prepare,
    biases=frozenset(("ssm_conv1d",)),
    rope=partial(read_rope, scalings=("default",)),
)  # fmt: skip


def _selects(mixer: str) -> dict[str, str]:
    """Names of what Mamba-1 has beside Mamba-2's."""
    names = {ours: theirs for ours, theirs in _names(mixer).items() if not ours.endswith("ssm_norm")}
    return names | in_layers({"ssm_x": f"{mixer}.x_proj", "ssm_dt": f"{mixer}.dt_proj"})


def _scans(size: str, kernel: str, rank: str, width: Callable[[Config], int]) -> tuple[Setting, ...]:
    """Settings of Mamba-1, by their keys in config.json. width: of a config without it."""
    return (
        Count(kernel, ("ssm.conv_kernel",), "head_dim", 4),
        Count(size, ("ssm.state_size",), "head_dim", 16),
        Count(rank, ("ssm.time_step_rank",), "hidden", lambda config: -(-config.count("hidden_size", "hidden") // 16)),
        Count("intermediate_size" if kernel == "conv_kernel" else "", ("ssm.inner_size",), "ffn", width),
        Fixed("hidden_act", "silu"),
    )


def _expanded(key: str, config: Config) -> int:
    return config.count(key, "heads", 2) * config.count("hidden_size", "hidden")


def _without_heads(config: Config, _sizes: Sizes) -> dict[str, Field]:
    """llama.cpp wants fields of attention and feed-forward networks in all files."""
    none = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
    fields: dict[str, Field] = {key: np.uint32(0) for key in none}
    if config.get("model_type") == "falcon_mamba":
        epsilon = np.float32(config.positive("mixer_rms_eps", 1e-6))
        fields |= {"ssm.dt_b_c_rms": True, "ssm.dt_b_c_rms_epsilon": epsilon}
    return fields


MAMBA = Architecture(
    name="mamba",
    settings=(
        *(each for each in USUAL if each.theirs in ("hidden_size", "num_hidden_layers", "vocab_size")),
        Count("", ("attention.head_count", "attention.head_count_kv"), "heads", 1),
        Count("", ("attention.key_length",), "head_dim", 2),
        Count("", ("context_length",), "context", 1 << 20),
        Number("layer_norm_epsilon", ("attention.layer_norm_rms_epsilon",), 1e-5),
        *_scans("state_size", "conv_kernel", "time_step_rank", partial(_expanded, "expand")),
        Fixed("use_bias", False), Fixed("use_conv_bias", True),
    ),
    others=_without_heads,
    names={
        "token_embd": "embeddings", **in_layers({"attn_norm": "norm"}), **_selects("mixer"), "output_norm": "norm_f",
        "output": "lm_head",
    },
    parameters=in_layers({"ssm_a": "mixer.A_log", "ssm_d": "mixer.D"}),
    root="backbone.",
    prepare=_prepare,
    biases=frozenset(("ssm_conv1d", "ssm_dt")),
    tied=True,
)  # fmt: skip


def _jamba(config: Config, sizes: Sizes) -> dict[str, Field]:
    period, experts = config.count("attn_layer_period", "layers", 8), config.count("num_experts", "ffn", 16)
    first = config.get("attn_layer_offset", 4)
    kv_heads = [sizes.kv_heads * (layer % period == first) for layer in range(sizes.layers)]
    fields: dict[str, Field] = {"attention.head_count_kv": np.array(kv_heads, np.int32)}
    if experts > 1:
        used = config.count("num_experts_per_tok", "ffn", 2)
        fields |= {"expert_count": np.uint32(experts), "expert_used_count": np.uint32(used)}
    return fields


JAMBA = Architecture(
    name="jamba",
    settings=(
        *USUAL,
        *_scans("mamba_d_state", "mamba_d_conv", "mamba_dt_rank", partial(_expanded, "mamba_expand")),
        Fixed("mamba_proj_bias", False), Fixed("mamba_conv_bias", True), Fixed("sliding_window", None),
    ),
    others=_jamba,
    names=LLAMA_NAMES | {"output_norm": "final_layernorm"} | _selects("mamba") | in_layers(
        {
            "ssm_dt_norm": "mamba.dt_layernorm", "ssm_b_norm": "mamba.b_layernorm", "ssm_c_norm": "mamba.c_layernorm",
            "ffn_norm": "pre_ff_layernorm", "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
            **{f"ffn_{part}_exps": f"feed_forward.experts.*.{part}_proj" for part in ("gate", "up", "down")},
        }
    ),
    parameters=in_layers({"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"}),
    prepare=lambda tensors, config: _prepare(stack_experts(tensors), config),
    biases=frozenset(("ssm_conv1d", "ssm_dt")),
)  # fmt: skip
