"""Granite 3 and 4, dense: Llama with scalar factors on embeddings, scores, residual additions and logits.

Dense models of Granite 4 are `granitemoehybrid` in Hugging Face, without experts and with attention in all layers.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    FFN_BIASES,
    INTERLEAVED,
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
)
from edge.converters.huggingface.architectures.llama import llama_rope, mistral_window
from edge.converters.huggingface.architectures.settings import Count, Number, Setting, short
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import split
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.structure.spec import ModelSpec

_SCORES, _EMBEDDING, _RESIDUAL, _LOGITS = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip
FACTORS: tuple[Setting, ...] = (
    Number(_SCORES, ("attention.scale",), 1.0, written=False),
    Number(_EMBEDDING, ("embedding_scale",), 1.0, written=False),
    Number(_RESIDUAL, ("residual_scale",), 1.0, written=False),
    Number(_LOGITS, ("logit_scale",), 1.0, written=False),
)


def _dense_fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    types = config.get("layer_types")
    if not isinstance(types, list) or not set(map(str, types)) <= {"attention", "full_attention"}:
        raise UnsupportedError(f"{config.path}: layer_types: only models with attention in every layer are converted")
    config.must_be("position_embedding_type", "rope")
    return {"rope.scaling.finetuned": config.get("position_embedding_type") == "rope"}


def _described(file: GGUFFile, spec: ModelSpec, _said: dict[str, Any]) -> dict[str, Any]:
    network = spec.network
    if network is None or not (core := network.attention[0]) or not network.rotates(0):
        raise UnsupportedError(f"{file.path}: Hugging Face's granite models have RoPE, and this one has none")
    scales = {_SCORES: core.scale, _EMBEDDING: network.embedding_scale, _RESIDUAL: network.layers[0][0].scale}
    return {key: short(value) for key, value in scales.items()} | {_LOGITS: short(1 / network.logit_scale)}


GRANITE = Architecture(
    name="granite",
    model=("granite", "GraniteForCausalLM"),
    settings=(*USUAL, SILU, *FACTORS),
    others=mistral_window,
    described=_described,
    layouts=INTERLEAVED,
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": FFN_BIASES},
    rope=llama_rope,
)
_SHARED = Count("shared_intermediate_size", ("feed_forward_length",), "ffn", 1024)  # the only network
GRANITE_HYBRID = replace(
    GRANITE,
    settings=tuple(_SHARED if each.theirs == "intermediate_size" else each for each in GRANITE.settings),
    names=LLAMA_NAMES
    | in_layers({"ffn_gate": "shared_mlp.gate", "ffn_up": "shared_mlp.up", "ffn_down": "shared_mlp.output_linear"}),
    others=_dense_fields,
    maybe_biases={"attention_bias": ATTENTION_BIASES},
    prepare=partial(split, fused={"shared_mlp.input_linear": ("shared_mlp.gate", "shared_mlp.up")}),
)
