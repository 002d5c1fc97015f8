"""Gemma 2 and 3: norms before and after each block, stored as weight − 1; windows in all but every second or sixth
layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    HEAD_NORMS,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    Layout,
    Sizes,
    in_layers,
    layer_types,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting, changed, short
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.formats.gguf_writer import Field
from edge.model.architectures.gemma2 import query_scale
from edge.model.structure.spec import ModelSpec

_GELU = "gelu_pytorch_tanh"
_NAMES = LLAMA_NAMES | in_layers(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_PERIODS = {"gemma2": 2, "gemma3": 6}  # layers from one with full attention to the next, by default
_LARGEST = {"gemma2": 46, "gemma3": 62}  # layers of the 27B, whose queries readers of GGUF scale in its own way
_GEMMA2_SETTINGS = changed(USUAL, head_dim=256)
_GEMMA3_SETTINGS = changed(  # whose files omit defaults
    USUAL, num_attention_heads=8, num_key_value_heads=4, head_dim=256, max_position_embeddings=131_072,
    vocab_size=262_208, hidden_size=2304, intermediate_size=9216, num_hidden_layers=26,
)  # fmt: skip
_FIXED: tuple[Setting, ...] = (
    Fixed("hidden_act", _GELU, ("gelu",), written=True),  # Gemma 2's first files name a wrong one
    Fixed("hidden_activation", _GELU, written=True),
    Fixed("use_bidirectional_attention", False),
    Fixed("attention_bias", False),
    Count("sliding_window", ("attention.sliding_window",), "context", 4096),
)
_CAPS: tuple[Setting, ...] = (
    Number("attn_logit_softcapping", ("attn_logit_softcapping",), 50.0),
    Number("final_logit_softcapping", ("final_logit_softcapping",), 30.0),
)
_GLOBAL_THETA, _LOCAL_THETA = 1e6, 1e4  # Gemma 3's
_ROPES = {
    "gemma2": partial(read_rope, scalings=("default",)),
    "gemma3": partial(read_rope, scalings=("default", "linear"), default_theta=_GLOBAL_THETA, by_layers=True),
}


def _others(kind: str, config: Config, sizes: Sizes) -> dict[str, Field]:
    for key in ("attn_logit_softcapping", "final_logit_softcapping") if kind == "gemma2" else ():
        if key in config.values and config.get(key) is None:
            raise UnsupportedError(f"{config.path}: {key} is null: GGUF cannot say that Gemma 2 caps nothing")
    _check_query_scale(kind, config, sizes)
    fields: dict[str, Field] = {}
    period = _period(kind, config, sizes)
    if period != _PERIODS[kind]:
        fields["attention.sliding_window_pattern"] = np.uint32(period)
    if kind == "gemma2":
        return fields
    config.must_be("attn_logit_softcapping")
    if config.get("final_logit_softcapping") is not None:
        fields["final_logit_softcapping"] = np.float32(config.positive("final_logit_softcapping"))
    return fields | {"rope.freq_base_swa": np.float32(_local_theta(config))}


def _check_query_scale(kind: str, config: Config, sizes: Sizes) -> None:
    """Check the divisor of scores: GGUF has no field for it, and its readers assume the usual one."""
    by_27b = sizes.layers == _LARGEST[kind]
    known = sizes.hidden / sizes.heads if by_27b else sizes.head_dim
    if config.positive("query_pre_attn_scalar", 256) != known:
        raise UnsupportedError(f"{config.path}: query_pre_attn_scalar must be {known:g}: GGUF has no field for it")


def _period(kind: str, config: Config, sizes: Sizes) -> int:
    """The n of "every n-th layer has full attention". Raises UnsupportedError if the file says something else."""
    types = config.get("layer_types")
    if types is None:
        return config.count("sliding_window_pattern", "layers", _PERIODS[kind])
    full = isinstance(types, list) and "full_attention" in types
    period = types.index("full_attention") + 1 if full else _PERIODS[kind]  # none: fewer layers than a period
    if period < 2 or types != layer_types(period, sizes.layers):
        usual = f"such as every {_PERIODS[kind]}th, as in {kind}"
        raise UnsupportedError(f"{config.path}: layer_types must have full_attention in every n-th layer, {usual}")
    return period


def _local_theta(config: Config) -> float:
    parameters = config.part("rope_parameters")
    local = parameters.part("sliding_attention") if parameters else None
    usual = config.positive("rope_local_base_freq", _LOCAL_THETA)
    if local is None:
        return usual
    for key in ("rope_type", "type"):
        local.must_be(key, "default")
    return local.positive("rope_theta", usual)


def _described(kind: str, file: GGUFFile, spec: ModelSpec, _said: dict[str, Any]) -> dict[str, Any]:
    header = Header(file, kind)
    period = header.count("attention.sliding_window_pattern", "layers", default=_PERIODS[kind])
    said: dict[str, Any] = {
        "query_pre_attn_scalar": round(query_scale(spec, _LARGEST[kind]) ** -2),
        "layer_types": layer_types(period, spec.layers),
    }
    if kind == "gemma2":
        return said
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        said[key] = None if header.value(key) is None else short(header.value(key))
    said["rope_local_base_freq"] = short(header.positive("rope.freq_base_swa", _LOCAL_THETA, below=1e12))
    return said | {"sliding_window_pattern": period}


def _architecture(
    kind: str, model: tuple[str, str], settings: Iterable[Setting], names: dict[str, str]
) -> Architecture:
    norms: dict[str, Layout] = {name.rpartition(".")[2]: "plus one" for name in names if name.endswith("_norm")}
    return Architecture(
        name=kind,
        model=model,
        settings=(*settings, *_FIXED),
        names=names,
        others=partial(_others, kind),
        described=partial(_described, kind),
        layouts=norms,
        rope=_ROPES[kind],
        tied=True,
    )


GEMMA2 = _architecture("gemma2", ("gemma2", "Gemma2ForCausalLM"), (*_GEMMA2_SETTINGS, *_CAPS), _NAMES)
GEMMA3 = _architecture("gemma3", ("gemma3_text", "Gemma3ForCausalLM"), _GEMMA3_SETTINGS, _NAMES | HEAD_NORMS)
EMBEDDING_GEMMA = replace(
    GEMMA3,
    name="gemma-embedding",
    model=("", ""),
    settings=(
        *(each for each in GEMMA3.settings if each.theirs != "use_bidirectional_attention"),
        Fixed("use_bidirectional_attention", True),
    ),
    others=lambda config, sizes: {
        **_others("gemma3", config, sizes), "attention.causal": False, "pooling_type": np.uint32(1),
    },
)  # fmt: skip
