"""Gemma 2 and 3: norms before and after each block, stored as weight − 1; windows in all but every second or sixth
layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    HEAD_NORMS,
    LLAMA_NAMES,
    Architecture,
    Layout,
    Sizes,
    in_layers,
    short,
    usual_description,
    usual_fields,
    usual_sizes,
)
from edge.converters.huggingface.architectures.rope import described_rope, read_rope, rope_fields
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.formats.gguf_writer import Field
from edge.model.architectures.gemma2 import query_scale
from edge.model.spec import ModelSpec

_NAMES = LLAMA_NAMES | in_layers(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_PERIODS = {"gemma2": 2, "gemma3": 6}  # layers from one with full attention to the next, by default
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose queries readers of GGUF scale in its own way
_GEMMA3_SIZES = {  # defaults of Gemma 3, which its files omit
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "vocab_size": 262_208, "query_pre_attn_scalar": 256, "sliding_window": 4096, "rms_norm_eps": 1e-6,
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
}  # fmt: skip
_GEMMA2_SIZES = {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4  # Gemma 3's
_ROPES = {
    "gemma2": partial(read_rope, scalings=("default",)),
    "gemma3": partial(read_rope, scalings=("default", "linear"), default_theta=_GLOBAL_THETA, by_layers=True),
}


def _whole(kind: str, config: Config) -> Config:
    defaults = _GEMMA3_SIZES if kind == "gemma3" else _GEMMA2_SIZES
    return Config(config.path, defaults | {key: each for key, each in config.values.items() if each is not None})


def _sizes(kind: str, config: Config) -> Sizes:
    return usual_sizes(_whole(kind, config))


def _fields(kind: str, config: Config, sizes: Sizes) -> dict[str, Field]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping") if kind == "gemma2" else ():
        if key in config.values and config.get(key) is None:
            raise UnsupportedError(f"{config.path}: {key} is null: GGUF cannot say that Gemma 2 caps nothing")
    config = _whole(kind, config)
    for key in ("hidden_act", "hidden_activation"):  # Gemma 2's first files name a wrong one
        config.must_be(key, "gelu_pytorch_tanh", *(["gelu"] if key == "hidden_act" else []))
    config.must_be("use_bidirectional_attention", False)
    config.must_be("attention_bias", False)
    _check_query_scale(kind, config, sizes)
    rope = _ROPES[kind](config)
    rope.must_be("partial_rotary_factor", 1.0)
    fields = usual_fields(config, sizes) | rope_fields(rope, sizes)
    fields["attention.sliding_window"] = np.uint32(config.count("sliding_window", "context"))
    period = _period(kind, config, sizes)
    if period != _PERIODS[kind]:
        fields["attention.sliding_window_pattern"] = np.uint32(period)
    if kind == "gemma2":
        fields["attn_logit_softcapping"] = np.float32(config.positive("attn_logit_softcapping", 50.0))
        fields["final_logit_softcapping"] = np.float32(config.positive("final_logit_softcapping", 30.0))
        return fields
    config.must_be("attn_logit_softcapping")
    if config.get("final_logit_softcapping") is not None:
        fields["final_logit_softcapping"] = np.float32(config.positive("final_logit_softcapping"))
    fields["rope.freq_base_swa"] = np.float32(_local_theta(config))
    return fields


def _check_query_scale(kind: str, config: Config, sizes: Sizes) -> None:
    """Check the divisor of scores: GGUF has no field for it, and its readers assume the usual one."""
    by_27b = sizes.layers == _LARGEST[kind]
    known = sizes.hidden / sizes.heads if by_27b else sizes.head_dim
    if config.positive("query_pre_attn_scalar") != known:
        raise UnsupportedError(f"{config.path}: query_pre_attn_scalar must be {known:g}: GGUF has no field for it")


def _period(kind: str, config: Config, sizes: Sizes) -> int:
    """The n of "every n-th layer has full attention". Raises UnsupportedError if the file says something else."""
    types = config.get("layer_types")
    if types is None:
        return config.count("sliding_window_pattern", "layers", _PERIODS[kind])
    period = types.index("full_attention") + 1 if isinstance(types, list) and "full_attention" in types else 0
    if period < 2 or types != _layer_types(period, sizes.layers):
        raise UnsupportedError(f"{config.path}: layer_types must make every n-th layer one that sees everything")
    return period


def _layer_types(period: int, layers: int) -> list[str]:
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def _local_theta(config: Config) -> float:
    parameters = config.part("rope_parameters")
    local = parameters.part("sliding_attention") if parameters else None
    usual = config.positive("rope_local_base_freq", _LOCAL_THETA)
    if local is None:
        return usual
    for key in ("rope_type", "type"):
        local.must_be(key, "default")
    return local.positive("rope_theta", usual)


def _described(kind: str, file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    header = Header(file, kind)
    said = usual_description(spec) | described_rope(file, spec) | {"sliding_window": spec.window}
    said |= {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
    said["query_pre_attn_scalar"] = round(query_scale(spec, _LARGEST[kind]) ** -2)
    period = header.count("attention.sliding_window_pattern", "layers", default=_PERIODS[kind])
    said["layer_types"] = _layer_types(period, spec.layers)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0} if kind == "gemma2" else {}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        value = header.value(key) if header.value(key) is not None else caps.get(key)
        said[key] = None if value is None else short(value)
    if kind == "gemma2":
        return said | {"model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"]}
    said["rope_local_base_freq"] = short(header.positive("rope.freq_base_swa", _LOCAL_THETA, below=1e12))
    said["sliding_window_pattern"] = period
    return said | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}


def _architecture(kind: str, names: dict[str, str]) -> Architecture:
    norms: dict[str, Layout] = {name.rpartition(".")[2]: "plus one" for name in names if name.endswith("_norm")}
    return Architecture(
        name=kind,
        names=names,
        sizes=partial(_sizes, kind),
        fields=partial(_fields, kind),
        described=partial(_described, kind),
        layouts=norms,
        rope=_ROPES[kind],
        tied=True,
    )


GEMMA2 = _architecture("gemma2", _NAMES)
GEMMA3 = _architecture("gemma3", _NAMES | HEAD_NORMS)
