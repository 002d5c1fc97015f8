"""Gemma 4's text models: heads of two sizes, layers that read earlier ones' rows, per-layer embeddings, experts.

Layers with full attention rotate a part of each head; GGUF says so by factors that stop the other pairs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    HEAD_NORMS,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Count, Fixed, Setting, changed, header_fields
from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field
from edge.types import AnyArray

_WINDOW, _FULL = "sliding_attention", "full_attention"
_PERIOD = 6  # layers from one with full attention to the next, by default
_LOCAL_THETA = 10_000.0
_OVERRIDES = ("head_dim", "num_key_value_heads")  # by layer


def _layers(config: Config) -> int:
    return config.count("num_hidden_layers", "layers", 30)


def _types(config: Config) -> list[str]:
    layers = _layers(config)
    usual = [_WINDOW if (layer + 1) % _PERIOD else _FULL for layer in range(layers)]
    types = config.get("layer_types", usual)
    if not isinstance(types, list) or len(types) != layers or not set(map(str, types)) <= {_WINDOW, _FULL}:
        raise ModelFormatError(f"{config.path}: layer_types must name {_WINDOW} or {_FULL} for each layer")
    return [*types[:-1], _FULL]  # as in transformers


def _own(config: Config, layer: int) -> Config:
    """A layer's own settings."""
    part = config.part("per_layer_config")
    own = part.part(str(layer)) if part else None
    if part is None and _types(config)[layer] == _FULL:
        heads = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        also = {} if heads is None else {"num_key_value_heads": heads}
        own = Config(config.path, {"head_dim": config.get("global_head_dim", 512), **also})
    for key in own.values if own else ():
        if key not in _OVERRIDES:
            raise UnsupportedError(f"{config.path}: per_layer_config has {key}, which is not supported")
    return Config(config.path, {**{key: config.get(key) for key in _OVERRIDES}, **(own.values if own else {})})


def _size_of(kind: str, config: Config) -> int:
    """The size of heads in layers of this kind."""
    layers = [layer for layer, each in enumerate(_types(config)) if each == kind]
    sizes = {_own(config, layer).count("head_dim", "head_dim", 256) for layer in layers}
    if len(sizes) > 1:
        raise UnsupportedError(f"{config.path}: heads of {len(sizes)} sizes in layers with {kind}: not supported")
    return next(iter(sizes), config.count("head_dim", "head_dim", 256))


def _shared(config: Config) -> int:
    """Layers at the end that have no keys and values of their own."""
    shared = config.get("num_kv_shared_layers", 0)
    if config.get("backbone_hidden_size") is not None:
        return _layers(config)
    if not isinstance(shared, int) or isinstance(shared, bool) or not 0 <= shared < _layers(config):
        raise ModelFormatError(f"{config.path}: num_kv_shared_layers is {shared!r}, of {_layers(config)} layers")
    return shared


_PLACED = ("head_dim", "num_key_value_heads", "intermediate_size")
_SETTINGS: tuple[Setting, ...] = (
    *(each for each in changed(USUAL, num_attention_heads=8, num_hidden_layers=30, vocab_size=262_144,
                               max_position_embeddings=131_072, hidden_size=2304) if each.theirs not in _PLACED),
    Count("", ("attention.key_length", "attention.value_length"), "head_dim", partial(_size_of, _FULL)),
    Count("", ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), "head_dim",
          partial(_size_of, _WINDOW)),
    Count("num_key_value_heads", ("attention.head_count_kv",), "heads", 4),
    Count("sliding_window", ("attention.sliding_window",), "context", 512),
    Fixed("hidden_activation", "gelu_pytorch_tanh"), Fixed("attention_bias", False),
    Fixed("use_bidirectional_attention", False, ("vision",)),
)  # fmt: skip
_EXPERTS: tuple[Setting, ...] = (
    Count("num_experts", ("expert_count",), "ffn"), Count("top_k_experts", ("expert_used_count",), "ffn"),
    Count("moe_intermediate_size", ("expert_feed_forward_length",), "ffn"),
)  # fmt: skip


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    types, shared = _types(config), _shared(config)
    width = config.count("intermediate_size", "ffn", 9216)
    wide = 2 * width if config.get("use_double_wide_mlp", False) is True else width
    kv_heads = [_own(config, layer).count("num_key_value_heads", "heads", 4) for layer in range(sizes.layers)]
    inputs = config.get("hidden_size_per_layer_input", 256)
    fields: dict[str, Field] = {
        "attention.sliding_window_pattern": np.array([kind == _WINDOW for kind in types]),
        "attention.shared_kv_layers": np.uint32(shared),
        "feed_forward_length": np.array([width] * (sizes.layers - shared) + [wide] * shared, np.int32),
        "rope.freq_base_swa": np.float32(_local_theta(config)),
        "embedding_length_per_layer_input": np.uint32(0),
    }
    if len(set(kv_heads)) > 1:
        fields["attention.head_count_kv"] = np.array(kv_heads, np.int32)
    if inputs:
        fields["embedding_length_per_layer_input"] = np.uint32(config.count("hidden_size_per_layer_input", "ffn", 256))
        if (rows := config.count("vocab_size_per_layer_input", "vocab", 262_144)) != sizes.vocab:
            raise UnsupportedError(f"{config.path}: vocab_size_per_layer_input is {rows}, not {sizes.vocab}")
    if config.get("enable_moe_block", False) is True:
        fields |= header_fields(_EXPERTS, config)
    if config.get("final_logit_softcapping") is not None:
        fields["final_logit_softcapping"] = np.float32(config.positive("final_logit_softcapping"))
    return fields


def _local_theta(config: Config) -> float:
    parameters = config.part("rope_parameters")
    local = parameters.part(_WINDOW) if parameters else None
    if local is None:
        return _LOCAL_THETA
    local.must_be("rope_type", "default")
    return local.positive("rope_theta", _LOCAL_THETA)


def _rope(config: Config) -> Config:
    if config.get("rope_parameters") is None:
        usual: dict[str, Any] = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
        config = Config(config.path, {**config.values, "rope_parameters": {_FULL: usual}})
    return read_rope(config, ("default", "proportional"), 1e6, by_layers=True)


def _prepare(tensors: Tensors, config: Config) -> Tensors:
    """Drop the keys and values that some checkpoints have for layers that read the rows of other layers, and values
    that are keys. Raises ModelFormatError for missing values."""
    layers, same = _layers(config), config.get("attention_k_eq_v", False) is True
    sharing = range(layers - _shared(config), layers)
    parts = [(layer, part) for layer in sharing for part in ("k_proj", "v_proj", "k_norm")]
    parts += [(layer, "v_proj") for layer, kind in enumerate(_types(config)) if same and kind == _FULL]
    unused = tuple(f"layers.{layer}.self_attn.{part}.weight" for layer, part in parts)
    found = {name: tensor for name, tensor in tensors.items() if not name.endswith(unused)}
    for name, keys in found.items():
        values = name.replace(".k_proj.", ".v_proj.")
        if values not in found and not values.endswith(unused):
            raise ModelFormatError(f"{keys.path}: the tensor {values} is missing")
    return found


_ORDERING = "masked_embedding.token_ordering"
_AROUND = ("pre_projection.weight", "post_projection.weight", "masked_embedding.centroids.weight")


def _assists(config: Config, sizes: Sizes) -> dict[str, Field]:
    fields = _others(config, sizes)
    fields["embedding_length_out"] = np.uint32(config.count("backbone_hidden_size", "hidden"))
    fields["nextn_predict_layers"] = np.uint32(sizes.layers)
    if config.get("use_ordered_embeddings", False) is True:
        fields["masked_embedding.centroid_count"] = np.uint32(config.count("num_centroids", "vocab", 2048))
        fields["masked_embedding.top_k"] = np.uint32(config.count("centroid_intermediate_top_k", "vocab", 32))
    return fields


def _around(tensors: Tensors, _config: Config) -> Tensors:
    """Put the tensors around the text model under its root, and leave the order of tokens to `_ordering`."""
    return {f"model.{name}" if name in _AROUND else name: each for name, each in tensors.items() if name != _ORDERING}


def _ordering(tensors: Mapping[str, CheckpointTensor]) -> dict[str, AnyArray]:
    return {"masked_embd_ordering": tensors[_ORDERING].read().astype(np.int32)} if _ORDERING in tensors else {}


GEMMA4 = Architecture(
    name="gemma4",
    settings=_SETTINGS,
    names=LLAMA_NAMES | HEAD_NORMS | in_layers(
        {
            "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm", "post_norm": "post_per_layer_input_norm",
            "inp_gate": "per_layer_input_gate", "proj": "per_layer_projection", "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2", "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        }
    ) | {
        "per_layer_token_embd": "embed_tokens_per_layer", "per_layer_model_proj": "per_layer_model_projection",
        "per_layer_proj_norm": "per_layer_projection_norm",
    },
    parameters=in_layers(
        {
            "layer_output_scale.weight": "layer_scalar", "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps.weight": "experts.gate_up_proj", "ffn_down_exps.weight": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
        }
    ),
    others=_others,
    prepare=_prepare,
    rope=_rope,
    partial_rope=True,
    tied=True,
    adapts=True,
)  # fmt: skip

ASSISTANT = replace(
    GEMMA4,
    name="gemma4-assistant",
    names={
        **GEMMA4.names,
        "nextn.pre_projection": "pre_projection", "nextn.post_projection": "post_projection",
        "masked_embd_centroids": "masked_embedding.centroids",
    },
    others=_assists,
    prepare=_around,
    arrays=_ordering,
)  # fmt: skip
