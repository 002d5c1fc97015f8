"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    INTERLEAVED,
    Architecture,
    Sizes,
    one_window,
    usual_description,
    usual_fields,
)
from edge.converters.huggingface.architectures.rope import described_rope, read_rope, rope_dimensions, rope_fields
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.architectures.smollm3 import PERIOD
from edge.model.spec import ModelSpec

_rope = partial(read_rope, scalings=("default", "linear", "yarn"), default_theta=2e6)


def _fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    config.must_be("hidden_act", "silu")
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        config.must_be(key, False)
    one_window(config, sizes, 0)
    said, usual = config.get("no_rope_layers"), _rotated(sizes.layers)
    if said is not None and not (isinstance(said, list) and said[: sizes.layers] == usual):
        raise UnsupportedError(f"{config.path}: no_rope_layers: in GGUF, each {PERIOD}th layer has no RoPE, no other")
    if said is None:
        config.must_be("no_rope_layer_interval", PERIOD)
    rope = _rope(config)
    rope.must_be("partial_rotary_factor", 1.0)
    fields = usual_fields(config, sizes) | rope_fields(rope, sizes)
    fields["rope.dimension_count"] = np.uint32(rope_dimensions(rope, sizes))
    return fields


def _rotated(layers: int) -> list[int]:
    """`no_rope_layers` of config.json, which despite its name holds 1 for layers with RoPE."""
    return [int((layer + 1) % PERIOD != 0) for layer in range(layers)]


def _described(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    return (
        usual_description(spec)
        | described_rope(file, spec)
        | {
            "model_type": "smollm3",
            "architectures": ["SmolLM3ForCausalLM"],
            "hidden_act": "silu",
            "no_rope_layers": _rotated(spec.layers),
            "no_rope_layer_interval": PERIOD,
            "use_sliding_window": False,
        }
    )


SMOLLM3 = Architecture(
    name="smollm3",
    fields=_fields,
    described=_described,
    layouts=INTERLEAVED,
    rope=_rope,
    tied=True,
)
