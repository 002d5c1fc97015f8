"""SmolLM3: Llama without RoPE in every fourth layer."""

from __future__ import annotations

from functools import partial

from edge.converters.huggingface.architectures.common import (
    INTERLEAVED,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    one_window,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf_writer import Field
from edge.model.architectures.smollm3 import PERIOD


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    one_window(config, sizes, 0)
    said, usual = config.get("no_rope_layers"), _rotated(sizes.layers)
    if said is not None and not (isinstance(said, list) and said[: sizes.layers] == usual):
        raise UnsupportedError(f"{config.path}: no_rope_layers: in GGUF, each {PERIOD}th layer has no RoPE, no other")
    if said is None:
        config.must_be("no_rope_layer_interval", PERIOD)
    return {}


def _rotated(layers: int) -> list[int]:
    """`no_rope_layers` of config.json, which despite its name holds 1 for layers with RoPE."""
    return [int((layer + 1) % PERIOD != 0) for layer in range(layers)]


SMOLLM3 = Architecture(
    name="smollm3",
    model=("smollm3", "SmolLM3ForCausalLM"),
    settings=(
        *USUAL, SILU, Fixed("attention_bias", False), Fixed("mlp_bias", False),
        Fixed("use_sliding_window", False, written=True),
    ),
    others=_others,
    described=lambda _file, spec, _said: {
        "no_rope_layers": _rotated(spec.layers), "no_rope_layer_interval": PERIOD,
    },
    layouts=INTERLEAVED,
    rope=partial(read_rope, scalings=("default", "linear", "yarn"), default_theta=2e6),
    tied=True,
)  # fmt: skip
