"""Llama's family, which includes SmolLM, and Mistral: the same model with a sliding window. Arcee's AFM: Llama with
ReLU² and no gate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    FFN_BIASES,
    INTERLEAVED,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    Sizes,
    nothing_else,
    one_window,
    window_fields,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed
from edge.converters.huggingface.config import Config
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.structure.spec import ModelSpec

llama_rope = partial(read_rope, scalings=("default", "linear", "yarn", "llama3"))


def mistral_window(config: Config, sizes: Sizes) -> dict[str, Field]:
    """The sliding window, which of these models Mistral's alone have."""
    if config.get("model_type") == "mistral":
        return window_fields(config, sizes)
    one_window(config, sizes, 0)
    return {}


def _described(_file: GGUFFile, spec: ModelSpec, _said: dict[str, Any]) -> dict[str, Any]:
    if not spec.window:
        return {}
    return {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": spec.window}


LLAMA = Architecture(
    name="llama",
    model=("llama", "LlamaForCausalLM"),
    others=mistral_window,
    described=_described,
    layouts=INTERLEAVED,
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": FFN_BIASES},
    rope=llama_rope,
)
ARCEE = replace(
    LLAMA,
    name="arcee",
    model=("arcee", "ArceeForCausalLM"),
    settings=(*USUAL, Fixed("hidden_act", "relu2", written=True)),
    described=nothing_else,
    names=without(LLAMA_NAMES, "ffn_gate"),
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": frozenset(("ffn_up", "ffn_down"))},
    yarn_bounds=True,
)
