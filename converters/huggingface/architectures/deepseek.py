"""Multi-head latent attention: Youtu-LLM, which is dense, DeepSeek-V3's mixtures, such as Moonlight, GLM-4.7-Flash.

GGUF has the two halves of `kv_b_proj` apart, and the keys' half of each head transposed, as absorbed queries read it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

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
from edge.converters.huggingface.architectures.settings import Count, Fixed, Setting, changed
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors, View, stack_experts
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field

_BOTH = "self_attn.kv_b_proj.weight"
_FACTORS = {"glm4_moe_lite": 1.8}  # of experts' outputs, where config.json says nothing
_SIGMOID = 2  # llama.cpp's number of the router


def _sum_of(*keys: str) -> Count:
    """A count that is a sum of settings, of the kind of heads' sizes; its field comes first."""
    return Count("", keys[:1], "head_dim", lambda config: sum(config.count(key, "head_dim") for key in keys[1:]))


_REPLACED = ("num_key_value_heads", "head_dim")
_SETTINGS: tuple[Setting, ...] = (
    *(each for each in USUAL if each.theirs not in _REPLACED),
    SILU,
    Count("", ("attention.head_count_kv",), "heads", 1, written=False),
    Count("kv_lora_rank", ("attention.kv_lora_rank", "attention.value_length"), "head_dim"),
    _sum_of("attention.key_length", "kv_lora_rank", "qk_rope_head_dim"),
    _sum_of("attention.key_length_mla", "qk_nope_head_dim", "qk_rope_head_dim"),
    Count("v_head_dim", ("attention.value_length_mla",), "head_dim"),
    Fixed("attention_bias", False),
    Fixed("rope_interleave", True),
)


def _dense(config: Config, sizes: Sizes) -> dict[str, Field]:
    """llama.cpp wants fields of experts in all files."""
    none = {"leading_dense_block_count": sizes.layers, "expert_shared_count": 0}
    none["expert_feed_forward_length"] = config.count("intermediate_size", "ffn")
    return _others(config) | {key: np.uint32(value) for key, value in none.items()}


def _others(config: Config) -> dict[str, Field]:
    fields: dict[str, Field] = {"rope.dimension_count": np.uint32(config.count("qk_rope_head_dim", "head_dim"))}
    if config.get("q_lora_rank") is not None:
        fields["attention.q_lora_rank"] = np.uint32(config.count("q_lora_rank", "hidden"))
    return fields


def _experts(config: Config, sizes: Sizes) -> dict[str, Field]:
    leading, kinds = config.get("first_k_dense_replace", 3), config.get("mlp_layer_types")
    if isinstance(kinds, list) and len(kinds) == sizes.layers:
        leading = sum(kind == "dense" for kind in kinds)
        if kinds != ["dense"] * leading + ["sparse"] * (sizes.layers - leading):
            raise UnsupportedError(f"{config.path}: mlp_layer_types: in GGUF, dense layers come first")
    if not isinstance(leading, int) or not 0 <= leading <= sizes.layers:
        raise ModelFormatError(f"{config.path}: first_k_dense_replace is {leading!r}, of {sizes.layers} layers")
    if config.get("n_group", 1) != 1:
        raise UnsupportedError(f"{config.path}: n_group: experts that are chosen by groups are not supported")
    return _others(config) | {
        "leading_dense_block_count": np.uint32(leading),
        "expert_gating_func": np.uint32(_SIGMOID),
        "expert_weights_norm": True,
        "expert_weights_scale": np.float32(
            config.positive("routed_scaling_factor", _FACTORS.get(str(config.get("model_type")), 2.5))
        ),
    }


def _prepare(tensors: Tensors, config: Config) -> Tensors:
    """Divide `kv_b_proj`, [heads · (plain + value), rank]. Raises ModelFormatError for another shape."""
    layers = config.count("num_hidden_layers", "layers")
    heads, plain = config.count("num_attention_heads", "heads"), config.count("qk_nope_head_dim", "head_dim")
    value, rank = config.count("v_head_dim", "head_dim"), config.count("kv_lora_rank", "head_dim")
    found: Tensors = {}
    for name, tensor in stack_experts(tensors).items():
        if name.startswith(f"model.layers.{layers}."):  # for multi-token prediction
            continue
        if not name.endswith(_BOTH):
            found[name] = tensor
            continue
        if tensor.shape != (heads * (plain + value), rank):
            wanted = (heads * (plain + value), rank)
            raise ModelFormatError(f"{tensor.path}: {tensor.name} has shape {tensor.shape} instead of {wanted}")
        keys, values = name.replace("kv_b_proj", "k_b_proj"), name.replace("kv_b_proj", "v_b_proj")
        found[keys] = View(
            tensor, keys, (heads, rank, plain),
            lambda array: array.reshape(heads, plain + value, rank)[:, :plain].swapaxes(1, 2),
        )  # fmt: skip
        found[values] = View(
            tensor, values, (heads, value, rank),
            lambda array: array.reshape(heads, plain + value, rank)[:, plain:],
        )  # fmt: skip
    return found


_NAMES = without(LLAMA_NAMES, "attn_k", "attn_v") | in_layers(
    {
        "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_q_b": "self_attn.q_b_proj",
        "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
        "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    }
)  # fmt: skip
YOUTU = Architecture(
    name="deepseek2",
    settings=_SETTINGS,
    names=_NAMES,
    others=_dense,
    prepare=_prepare,
    rope=partial(read_rope, scalings=("default", "linear")),
    tied=True,
)
DEEPSEEK_V3 = replace(
    YOUTU,
    settings=(
        *_SETTINGS,
        Count("n_routed_experts", ("expert_count",), "ffn"),
        Count("num_experts_per_tok", ("expert_used_count",), "ffn"),
        Count("moe_intermediate_size", ("expert_feed_forward_length",), "ffn"),
        Count("n_shared_experts", ("expert_shared_count",), "heads"),
        Fixed("norm_topk_prob", True, written=True),
    ),
    names=_NAMES | in_layers(
        {
            "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.*.gate_proj",
            "ffn_up_exps": "mlp.experts.*.up_proj", "ffn_down_exps": "mlp.experts.*.down_proj",
            "ffn_gate_shexp": "mlp.shared_experts.gate_proj", "ffn_up_shexp": "mlp.shared_experts.up_proj",
            "ffn_down_shexp": "mlp.shared_experts.down_proj",
        }
    ),
    parameters=in_layers({"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}),
    others=_experts,
    tied=False,
)  # fmt: skip
GLM4_MOE_LITE = replace(DEEPSEEK_V3, settings=changed(DEEPSEEK_V3.settings, rms_norm_eps=1e-5))
