"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Qwen3: norms per head instead."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    LLAMA_NAMES,
    Architecture,
    Sizes,
    one_window,
    size_fields,
    usual_description,
    usual_sizes,
)
from edge.converters.huggingface.architectures.rope import described_rope, read_rope, rope_fields
from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

_rope = partial(read_rope, scalings=("default", "linear", "yarn"))


def _fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    config.must_be("hidden_act", "silu")
    without = config.get("max_window_layers", 28)
    if config.get("use_sliding_window") and not (isinstance(without, int) and without >= sizes.layers):
        raise UnsupportedError(f"{config.path}: windows in some layers only are not supported")
    one_window(config, sizes, 0)
    rope = _rope(config)
    rope.must_be("partial_rotary_factor", 1.0)
    fields = size_fields(sizes) | rope_fields(rope, sizes)
    fields["attention.layer_norm_rms_epsilon"] = np.float32(config.positive("rms_norm_eps", 1e-6))
    return fields


def _described(kind: str, file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    said = {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"], "hidden_act": "silu"}
    said |= usual_description(spec) | described_rope(file, spec) | {"use_sliding_window": False}
    return said | ({"attention_bias": "blk.0.attn_q.bias" in file.tensors} if kind == "qwen3" else {})


QWEN2 = Architecture(
    name="qwen2",
    root="model.",
    names=LLAMA_NAMES,
    sizes=usual_sizes,
    fields=_fields,
    described=partial(_described, "qwen2"),
    layouts={},
    biases=frozenset(("attn_q", "attn_k", "attn_v")),
    rope=_rope,
)
QWEN3 = Architecture(
    name="qwen3",
    root="model.",
    names=LLAMA_NAMES | HEAD_NORMS,
    sizes=usual_sizes,
    fields=_fields,
    described=partial(_described, "qwen3"),
    layouts={},
    maybe_biases={"attention_bias": ATTENTION_BIASES},
    rope=_rope,
)
