"""Phi-3 and Phi-4-mini: queries, keys and values in one matrix, gate and up in another; LongRoPE."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    LLAMA_NAMES,
    Architecture,
    Sizes,
    in_layers,
    one_window,
    usual_description,
    usual_fields,
)
from edge.converters.huggingface.architectures.rope import described_rope, read_rope, rope_dimensions, rope_fields
from edge.converters.huggingface.config import Config
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

_rope = partial(read_rope, scalings=("default", "longrope"))
_APART = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
_NAMES = {name: each for name, each in LLAMA_NAMES.items() if name.rpartition(".")[2] not in _APART}
_NAMES |= in_layers({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})


def _fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    config.must_be("hidden_act", "silu")
    rope = _rope(config)
    fields = usual_fields(config, sizes, norm_eps=1e-5) | rope_fields(rope, sizes)
    fields["rope.dimension_count"] = np.uint32(rope_dimensions(rope, sizes))
    original = rope.count("original_max_position_embeddings", "context")
    fields["rope.scaling.original_context_length"] = np.uint32(original)
    window = config.count("sliding_window", "context") if config.get("sliding_window") else 0
    fields["attention.sliding_window"] = np.uint32(one_window(config, sizes, window))
    return fields


def _described(file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    header = Header(file, "phi3")
    original = header.count("rope.scaling.original_context_length", "context", default=spec.context)
    said = usual_description(spec) | described_rope(file, spec)
    del said["head_dim"]  # it is hidden_size / num_attention_heads
    return said | {
        "model_type": "phi3",
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "original_max_position_embeddings": original,
        "partial_rotary_factor": spec.rope_dim / spec.head_dim,
        "sliding_window": spec.window or None,
    }


PHI3 = Architecture(
    name="phi3",
    names=_NAMES,
    fields=_fields,
    described=_described,
    rope=_rope,
    gate_in_up=True,
)
