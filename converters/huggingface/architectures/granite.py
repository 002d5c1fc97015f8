"""Granite 3 and 4, dense: Llama with scalar factors on embeddings, scores, residual additions and logits.

Dense models of Granite 4 are `granitemoehybrid` in Hugging Face, without experts and with attention in all layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    FFN_BIASES,
    INTERLEAVED,
    LLAMA_NAMES,
    Architecture,
    Sizes,
    in_layers,
    short,
    usual_description,
    usual_sizes,
)
from edge.converters.huggingface.architectures.llama import llama_fields, llama_rope
from edge.converters.huggingface.architectures.rope import described_rope
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

_FACTORS = {  # by GGUF's names; transformers' default is 1 for each
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    factors = {ours: np.float32(config.positive(theirs, 1.0)) for ours, theirs in _FACTORS.items()}
    return llama_fields(config, sizes) | factors


def _dense_sizes(config: Config) -> Sizes:
    """Sizes; the shared expert's network is the only one."""
    return replace(usual_sizes(config), ffn=config.count("shared_intermediate_size", "ffn", default=1024))


def _dense_fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    if config.get("num_local_experts", 8) != 0:
        raise UnsupportedError(f"{config.path}: num_local_experts is not 0: mixtures of experts are not converted")
    types = config.get("layer_types")
    if not isinstance(types, list) or not set(map(str, types)) <= {"attention", "full_attention"}:
        raise UnsupportedError(f"{config.path}: layer_types: only models with attention in every layer are converted")
    config.must_be("position_embedding_type", "rope")
    fields = _fields(
        Config(config.path, {key: each for key, each in config.values.items() if key != "layer_types"}), sizes
    )
    return fields | {"rope.scaling.finetuned": config.get("position_embedding_type") == "rope"}


def _described(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    network = spec.network
    if network is None or not (core := network.attention[0]) or not network.rotates(0):
        raise UnsupportedError(f"{file.path}: Hugging Face's granite models have RoPE, and this one has none")
    factors = (core.scale, network.embedding_scale, network.layers[0][0].scale, 1 / network.logit_scale)
    said = usual_description(spec) | described_rope(file, spec) | {"hidden_act": "silu"}
    said |= {name: short(factor) for name, factor in zip(_FACTORS.values(), factors, strict=True)}
    return said | {
        "model_type": "granite",
        "architectures": ["GraniteForCausalLM"],
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


GRANITE = Architecture(
    name="granite",
    fields=_fields,
    described=_described,
    layouts=INTERLEAVED,
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": FFN_BIASES},
    rope=llama_rope,
)
GRANITE_HYBRID = replace(
    GRANITE,
    names=LLAMA_NAMES
    | in_layers({"ffn_gate": "shared_mlp.gate", "ffn_up": "shared_mlp.up", "ffn_down": "shared_mlp.output_linear"}),
    sizes=_dense_sizes,
    fields=_dense_fields,
    maybe_biases={"attention_bias": ATTENTION_BIASES},
    fused={"shared_mlp.input_linear": ("shared_mlp.gate", "shared_mlp.up")},
)
