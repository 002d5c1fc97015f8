"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Qwen3: norms per head instead."""

from __future__ import annotations

from functools import partial
from typing import Any

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    LLAMA_NAMES,
    Architecture,
    Sizes,
    one_window,
    usual_description,
    usual_fields,
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
    fields = usual_fields(config, sizes) | rope_fields(rope, sizes)
    return fields


def _described(kind: str, file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    said = {"model_type": kind, "architectures": [f"{kind.capitalize()}ForCausalLM"], "hidden_act": "silu"}
    said |= usual_description(spec) | described_rope(file, spec) | {"use_sliding_window": False}
    return said | ({"attention_bias": "blk.0.attn_q.bias" in file.tensors} if kind == "qwen3" else {})


QWEN2 = Architecture(
    name="qwen2",
    fields=_fields,
    described=partial(_described, "qwen2"),
    biases=frozenset(("attn_q", "attn_k", "attn_v")),
    rope=_rope,
)
QWEN3 = Architecture(
    name="qwen3",
    names=LLAMA_NAMES | HEAD_NORMS,
    fields=_fields,
    described=partial(_described, "qwen3"),
    maybe_biases={"attention_bias": ATTENTION_BIASES},
    rope=_rope,
)
