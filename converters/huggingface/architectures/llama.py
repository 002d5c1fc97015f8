"""Llama's family, which includes SmolLM, and Mistral: the same model with a sliding window."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    FFN_BIASES,
    INTERLEAVED,
    Architecture,
    Sizes,
    one_window,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.config import Config
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

llama_rope = partial(read_rope, scalings=("default", "linear", "yarn", "llama3"))


def window_fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    said = config.get("sliding_window") and config.get("model_type") == "mistral"
    window = one_window(config, sizes, config.count("sliding_window", "context") if said else 0)
    return {"attention.sliding_window": np.uint32(window)} if window else {}


def _described(_file: GGUFFile, spec: ModelSpec, _said: dict[str, Any]) -> dict[str, Any]:
    if not spec.window:
        return {}
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": spec.window}


LLAMA = Architecture(
    name="llama",
    model=("llama", "LlamaForCausalLM"),
    others=window_fields,
    described=_described,
    layouts=INTERLEAVED,
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": FFN_BIASES},
    rope=llama_rope,
)
