"""Ministral 3: Llama with YaRN, and queries scaled up with their position. GGUF calls it `mistral3`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    INTERLEAVED,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    one_window,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed, changed, short
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.structure.spec import ModelSpec

_rope = partial(read_rope, scalings=("yarn",))
_BETA = "llama_4_scaling_beta"


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    one_window(config, sizes, 0)
    rope = _rope(config)
    return {"attention.temperature_scale": np.float32(rope.positive(_BETA))} if rope.get(_BETA) != 0 else {}


def _described(file: GGUFFile, spec: ModelSpec, said: dict[str, Any]) -> dict[str, Any]:
    """Mistral Small 3, which has neither YaRN nor a temperature, is a `mistral`."""
    temperature, scaling = spec.network and spec.network.temperature, said["rope_scaling"]
    if temperature is None and scaling is None:
        return {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    if scaling is None or scaling["rope_type"] != "yarn" or spec.window:
        raise UnsupportedError(f"{file.path}: Hugging Face's ministral3 models have YaRN and no windows")
    beta = short(temperature.slope) if temperature else 0.0
    rope = said.pop("rope_scaling") | {"rope_theta": said.pop("rope_theta"), _BETA: beta}
    return {"rope_parameters": rope}


MINISTRAL3 = Architecture(
    name="mistral3",
    model=("ministral3", "Ministral3ForCausalLM"),
    settings=(*changed(USUAL, rms_norm_eps=1e-5), SILU, Fixed("sliding_window", None, written=True)),
    others=_others,
    described=_described,
    layouts=INTERLEAVED,
    rope=_rope,
    yarn_bounds=True,
)
