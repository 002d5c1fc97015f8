"""Qwen3.5's text models: delta nets in most layers, attention with an output gate in the others; also with experts.

Norms are stored as weight − 1, except that of the delta net. Value head h of a checkpoint uses key head h div n, where
n value heads share one. In GGUF it is h mod the number of key heads, so value heads have another order there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from edge.converters.huggingface.architectures.common import (
    HEAD_NORMS,
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    Layout,
    Sizes,
    in_layers,
)
from edge.converters.huggingface.architectures.qwen import EXPERT_NAMES, EXPERTS
from edge.converters.huggingface.architectures.rope import read_rope, section_fields
from edge.converters.huggingface.architectures.settings import Count, Fixed, Setting, changed
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors, floats, reordered, stack_experts, without_middle
from edge.errors import ModelFormatError
from edge.formats.gguf_writer import Field
from edge.types import AnyArray

_NET = "linear_attn."
_LINEAR, _FULL = "linear_attention", "full_attention"
_KEY_HEADS, _VALUE_HEADS = "linear_num_key_heads", "linear_num_value_heads"
_KEY_SIZE, _VALUE_SIZE = "linear_key_head_dim", "linear_value_head_dim"
_rope = partial(read_rope, scalings=("default",), default_share=0.25)


def _inner(config: Config) -> int:
    return config.count(_VALUE_HEADS, "heads", 32) * config.count(_VALUE_SIZE, "head_dim", 128)


_SETTINGS: tuple[Setting, ...] = (
    *changed(USUAL, head_dim=256), SILU, Fixed("attention_bias", False), Fixed("attn_output_gate", True),
    Fixed("mlp_only_layers", []),
    Count("linear_conv_kernel_dim", ("ssm.conv_kernel",), "head_dim", 4),
    Count(_KEY_SIZE, ("ssm.state_size",), "head_dim", 128),
    Count(_KEY_HEADS, ("ssm.group_count",), "heads", 16),
    Count(_VALUE_HEADS, ("ssm.time_step_rank",), "heads", 32),
    Count("", ("ssm.inner_size",), "ffn", _inner),
)  # fmt: skip


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    interval = config.count("full_attention_interval", "layers", 4)
    usual = [_FULL if (layer + 1) % interval == 0 else _LINEAR for layer in range(sizes.layers)]
    types = config.get("layer_types", usual)
    if not isinstance(types, list) or len(types) != sizes.layers or not set(map(str, types)) <= {_LINEAR, _FULL}:
        raise ModelFormatError(f"{config.path}: layer_types must name {_LINEAR} or {_FULL} for each layer")
    fields: dict[str, Field] = {
        "full_attention_interval": np.uint32(interval),
        "attention.recurrent_layers": np.array([kind == _LINEAR for kind in types]),
    }
    return fields | section_fields(_rope(config))


def value_order(config: Config) -> AnyArray:
    """The checkpoint's index of each value head, in GGUF's order, [heads]."""
    keys, values = config.count(_KEY_HEADS, "heads", 16), config.count(_VALUE_HEADS, "heads", 32)
    if values % keys:
        raise ModelFormatError(f"{config.path}: {values} value heads cannot share {keys} key heads")
    order: AnyArray = np.arange(values).reshape(keys, -1).T.reshape(-1)
    return order


def prepare(tensors: Tensors, config: Config) -> Tensors:
    order, size = value_order(config), config.count(_VALUE_SIZE, "head_dim", 128)
    values = (order[:, None] * size + np.arange(size)).reshape(-1)
    front = 2 * config.count(_KEY_HEADS, "heads", 16) * config.count(_KEY_SIZE, "head_dim", 128)
    mixed = np.concatenate([np.arange(front), front + values])  # queries and keys, then values
    orders = {
        "in_proj_qkv.weight": (mixed, 0), "conv1d.weight": (mixed, 0), "in_proj_z.weight": (values, 0),
        "in_proj_a.weight": (order, 0), "in_proj_b.weight": (order, 0), "A_log": (order, 0), "dt_bias": (order, 0),
        "out_proj.weight": (values, 1),
    }  # fmt: skip
    found: Tensors = {}
    for name, tensor in stack_experts(tensors).items():
        part = name.rpartition(_NET)[2] if _NET in name else ""
        if part == "conv1d.weight":
            tensor = without_middle(tensor)
        elif part == "A_log":
            tensor = floats(tensor, lambda log: -np.exp(log))
        found[name] = reordered(tensor, *orders[part]) if part in orders else tensor
    return found


_NETS = in_layers(
    {
        "attn_qkv": f"{_NET}in_proj_qkv", "attn_gate": f"{_NET}in_proj_z", "ssm_alpha": f"{_NET}in_proj_a",
        "ssm_beta": f"{_NET}in_proj_b", "ssm_conv1d": f"{_NET}conv1d", "ssm_norm": f"{_NET}norm",
        "ssm_out": f"{_NET}out_proj", "post_attention_norm": "post_attention_layernorm",
    }
)  # fmt: skip
_NORMS: dict[str, Layout] = dict.fromkeys(
    ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"), "plus one"
)
QWEN35 = Architecture(
    name="qwen35",
    settings=_SETTINGS,
    names={ours: each for ours, each in LLAMA_NAMES.items() if not ours.endswith("ffn_norm")} | HEAD_NORMS | _NETS,
    parameters=in_layers({"ssm_a": f"{_NET}A_log", "ssm_dt.bias": f"{_NET}dt_bias"}),
    others=_others,
    layouts=_NORMS,
    prepare=prepare,
    rope=_rope,
    partial_rope=True,
)
_SHARED = Count("shared_expert_intermediate_size", ("expert_shared_feed_forward_length",), "ffn", 512)
# There is no dense network, but readers of GGUF want its size.
_WIDTH = Count("intermediate_size", ("feed_forward_length",), "ffn", 512)
QWEN35_MOE = replace(
    QWEN35,
    name="qwen35moe",
    settings=(
        *(_WIDTH if each.theirs == "intermediate_size" else each for each in _SETTINGS),
        *changed(EXPERTS, num_experts=256, moe_intermediate_size=512), _SHARED,
    ),
    names={**QWEN35.names} | EXPERT_NAMES | in_layers(
        {
            "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
            "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
        }
    ),
)  # fmt: skip
