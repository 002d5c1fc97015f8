"""LFM2 and LFM2.5: short convolutions in most layers, attention with norms of heads in the others; also mixtures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from edge.converters.huggingface.architectures.common import (
    USUAL,
    Architecture,
    Sizes,
    in_layers,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors, stack_experts, without_middle
from edge.errors import ModelFormatError
from edge.formats.gguf_writer import Field

_CONVOLUTION, _FULL = "conv", "full_attention"
_SIGMOID = 2  # llama.cpp's number of the router


def _width(config: Config) -> int:
    """The width of the feed-forward network: two thirds of the file's value, rounded up, unless the file forbids it."""
    width = config.count("block_ff_dim", "ffn", config.count("intermediate_size", "ffn", 12_288))
    if config.get("block_auto_adjust_ff_dim", True) is not True:
        return width
    multiple = config.count("block_multiple_of", "ffn", 256)
    width = int(config.positive("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    return -(-width // multiple) * multiple


_REPLACED = ("intermediate_size", "rms_norm_eps")
_SETTINGS: tuple[Setting, ...] = (
    *(each for each in USUAL if each.theirs not in _REPLACED),
    Number("norm_eps", ("attention.layer_norm_rms_epsilon",), 1e-5),
    Count("conv_L_cache", ("shortconv.l_cache",), "head_dim", 3),
    Fixed("conv_bias", False),
)


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    full = config.get("full_attn_idxs")
    usual = [_FULL if full is None or layer in full else _CONVOLUTION for layer in range(sizes.layers)]
    types = config.get("layer_types", usual)
    if not isinstance(types, list) or len(types) != sizes.layers or not set(map(str, types)) <= {_CONVOLUTION, _FULL}:
        raise ModelFormatError(f"{config.path}: layer_types must name {_CONVOLUTION} or {_FULL} for each layer")
    heads = [sizes.kv_heads if kind == _FULL else 0 for kind in types]
    return {"attention.head_count_kv": np.array(heads, np.int32)}


def _experts(config: Config, sizes: Sizes) -> dict[str, Field]:
    leading = config.get("num_dense_layers", 2)
    if not isinstance(leading, int) or not 0 <= leading <= sizes.layers:
        raise ModelFormatError(f"{config.path}: num_dense_layers is {leading!r}, of {sizes.layers} layers")
    fields: dict[str, Field] = {
        "leading_dense_block_count": np.uint32(leading), "expert_gating_func": np.uint32(_SIGMOID),
    }  # fmt: skip
    if (scale := config.positive("routed_scaling_factor", 1.0)) != 1:
        fields["expert_weights_scale"] = np.float32(scale)
    return _others(config, sizes) | fields


def _prepare(tensors: Tensors, _config: Config) -> Tensors:
    found = stack_experts(tensors)
    return {name: without_middle(each) if name.endswith("conv.conv.weight") else each for name, each in found.items()}


LFM2 = Architecture(
    name="lfm2",
    settings=(*_SETTINGS, Count("", ("feed_forward_length",), "ffn", _width)),
    names={
        "token_embd": "embed_tokens",
        **in_layers(
            {
                "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q": "self_attn.q_proj",
                "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.out_proj",
                "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm",
                "shortconv.in_proj": "conv.in_proj", "shortconv.conv": "conv.conv",
                "shortconv.out_proj": "conv.out_proj", "ffn_gate": "feed_forward.w1", "ffn_up": "feed_forward.w3",
                "ffn_down": "feed_forward.w2",
            }
        ),
        "token_embd_norm": "embedding_norm",
        "output": "lm_head",
    },
    others=_others,
    prepare=_prepare,
    rope=partial(read_rope, scalings=("default", "linear", "yarn"), default_theta=1e6),
    tied=True,
)  # fmt: skip
LFM2_MOE = replace(
    LFM2,
    name="lfm2moe",
    settings=(
        *_SETTINGS,
        Count("intermediate_size", ("feed_forward_length",), "ffn", 7168),
        Count("num_experts", ("expert_count",), "ffn", 32),
        Count("num_experts_per_tok", ("expert_used_count",), "ffn", 4),
        Count("moe_intermediate_size", ("expert_feed_forward_length",), "ffn", 1792),
        Fixed("norm_topk_prob", True), Fixed("use_expert_bias", True),
    ),
    names={**LFM2.names} | in_layers(
        {
            "ffn_gate_inp": "feed_forward.gate", "ffn_gate_exps": "feed_forward.experts.*.w1",
            "ffn_up_exps": "feed_forward.experts.*.w3", "ffn_down_exps": "feed_forward.experts.*.w2",
        }
    ),
    parameters=in_layers({"exp_probs_b.bias": "feed_forward.expert_bias"}),
    others=_experts,
)  # fmt: skip
