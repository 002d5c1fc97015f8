"""Ministral 3: Llama with YaRN, and queries scaled up with their position. GGUF calls it `mistral3`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    INTERLEAVED,
    Architecture,
    Sizes,
    one_window,
    short,
    usual_description,
    usual_fields,
)
from edge.converters.huggingface.architectures.rope import described_rope, read_rope, rope_dimensions, rope_fields
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

_rope = partial(read_rope, scalings=("yarn",))
_BETA = "llama_4_scaling_beta"


def _fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    config.must_be("hidden_act", "silu")
    config.must_be("sliding_window")
    one_window(config, sizes, 0)
    rope = _rope(config)
    rope.must_be("partial_rotary_factor", 1.0)
    fields = usual_fields(config, sizes, norm_eps=1e-5) | rope_fields(rope, sizes, bounds=True)
    fields["rope.dimension_count"] = np.uint32(rope_dimensions(rope, sizes))
    if rope.get(_BETA) != 0:
        fields["attention.temperature_scale"] = np.float32(rope.positive(_BETA))
    return fields


def _described(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    """config.json; Mistral Small 3, which has neither YaRN nor a temperature, is a `mistral`."""
    said = usual_description(spec) | described_rope(file, spec) | {"hidden_act": "silu", "sliding_window": None}
    temperature, scaling = spec.network and spec.network.temperature, said["rope_scaling"]
    if temperature is None and scaling is None:
        return said | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    if scaling is None or scaling["rope_type"] != "yarn" or spec.window:
        raise UnsupportedError(f"{file.path}: Hugging Face's ministral3 models have YaRN and no windows")
    theta = said.pop("rope_theta")
    said["rope_parameters"] = said.pop("rope_scaling") | {
        "rope_theta": theta,
        _BETA: short(temperature.slope) if temperature else 0.0,
    }
    return said | {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"]}


MINISTRAL3 = Architecture(
    name="mistral3",
    fields=_fields,
    described=_described,
    layouts=INTERLEAVED,
    rope=_rope,
)
