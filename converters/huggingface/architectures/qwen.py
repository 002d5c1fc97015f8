"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Qwen3: norms per head instead, and mixtures."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
    one_window,
)
from edge.converters.huggingface.architectures.rope import read_rope, section_fields
from edge.converters.huggingface.architectures.settings import Count, Fixed, Setting
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors, stack_experts
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field

_rope = partial(read_rope, scalings=("default", "linear", "yarn"))


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    without = config.get("max_window_layers", 28)
    if config.get("use_sliding_window") and not (isinstance(without, int) and without >= sizes.layers):
        raise UnsupportedError(f"{config.path}: windows in some layers only are not supported")
    one_window(config, sizes, 0)
    return {}


_SETTINGS: tuple[Setting, ...] = (*USUAL, SILU)
QWEN2 = Architecture(
    name="qwen2",
    model=("qwen2", "Qwen2ForCausalLM"),
    settings=_SETTINGS,
    others=_others,
    described=lambda _file, _spec, _said: {"use_sliding_window": False},
    biases=frozenset(("attn_q", "attn_k", "attn_v")),
    rope=_rope,
)
QWEN3 = replace(
    QWEN2,
    name="qwen3",
    model=("qwen3", "Qwen3ForCausalLM"),
    names=LLAMA_NAMES | HEAD_NORMS,
    biases=frozenset(),
    maybe_biases={"attention_bias": ATTENTION_BIASES},
)

_VL_ROPE = partial(_rope, default_theta=1e6)


def _others_vl2(config: Config, sizes: Sizes) -> dict[str, Field]:
    return _others(config, sizes) | section_fields(_VL_ROPE(config), (16, 24, 24))


def _others_vl3(config: Config, sizes: Sizes) -> dict[str, Field]:
    deep = config.get("deepstack_visual_indexes", [])  # of the vision tower
    if not isinstance(deep, list) or len(deep) > sizes.layers:
        raise ModelFormatError(f"{config.path}: deepstack_visual_indexes must be a list of layers")
    parts = {"n_deepstack_layers": np.uint32(len(deep))}
    return _others(config, sizes) | section_fields(_VL_ROPE(config), (24, 20, 20)) | parts


QWEN2_VL = replace(QWEN2, name="qwen2vl", model=("", ""), others=_others_vl2, rope=_VL_ROPE)
QWEN3_VL = replace(QWEN3, name="qwen3vl", model=("", ""), others=_others_vl3, rope=_VL_ROPE)

EXPERTS: tuple[Setting, ...] = (
    # transformers writes the second name, publishers the first
    Count("num_experts", ("expert_count",), "ffn", lambda config: config.count("num_local_experts", "ffn", 128)),
    Count("num_experts_per_tok", ("expert_used_count",), "ffn", 8),
    Count("moe_intermediate_size", ("expert_feed_forward_length",), "ffn", 768),
)
EXPERT_NAMES = in_layers(
    {
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
    }
)


def _experts(config: Config, sizes: Sizes) -> dict[str, Field]:
    if config.get("norm_topk_prob", False) is not True:
        raise UnsupportedError(f"{config.path}: norm_topk_prob is not true, which is not supported")
    return _others(config, sizes)


def _stacked(tensors: Tensors, _config: Config) -> Tensors:
    return stack_experts(tensors)


_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
QWEN3_MOE = replace(
    QWEN3,
    name="qwen3moe",
    model=("", ""),
    settings=(*_SETTINGS, *EXPERTS, Fixed("decoder_sparse_step", 1), Fixed("mlp_only_layers", [])),
    names={ours: each for ours, each in QWEN3.names.items() if not ours.endswith(_DENSE)} | EXPERT_NAMES,
    others=_experts,
    prepare=_stacked,
    maybe_biases={},
)
