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
    usual_description,
    usual_fields,
)
from edge.converters.huggingface.architectures.rope import described_rope, read_rope, rope_dimensions, rope_fields
from edge.converters.huggingface.config import Config
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

llama_rope = partial(read_rope, scalings=("default", "linear", "yarn", "llama3"))


def llama_fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    config.must_be("hidden_act", "silu")
    rope = llama_rope(config)
    rope.must_be("partial_rotary_factor", 1.0)
    fields = usual_fields(config, sizes) | rope_fields(rope, sizes)
    fields["rope.dimension_count"] = np.uint32(rope_dimensions(rope, sizes))
    said = config.get("sliding_window") and config.get("model_type") == "mistral"
    if window := one_window(config, sizes, config.count("sliding_window", "context") if said else 0):
        fields["attention.sliding_window"] = np.uint32(window)
    return fields


def _described(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    said = usual_description(spec) | described_rope(file, spec) | {"hidden_act": "silu"}
    if spec.window:
        return said | {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": spec.window}
    said |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return said | {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


LLAMA = Architecture(
    name="llama",
    fields=llama_fields,
    described=_described,
    layouts=INTERLEAVED,
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": FFN_BIASES},
    rope=llama_rope,
)
