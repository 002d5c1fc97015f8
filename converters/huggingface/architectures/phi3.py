"""Phi-3 and Phi-4-mini: queries, keys and values in one matrix, gate and up in another; LongRoPE."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import (
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
    one_window,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import changed
from edge.converters.huggingface.config import Config
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.formats.gguf_writer import Field
from edge.model.structure.spec import ModelSpec

_rope = partial(read_rope, scalings=("default", "longrope"))
_APART = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")
_NAMES = {name: each for name, each in LLAMA_NAMES.items() if name.rpartition(".")[2] not in _APART}
_NAMES |= in_layers({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"})
_ORIGINAL = "original_max_position_embeddings"


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    window = config.count("sliding_window", "context") if config.get("sliding_window") else 0
    return {
        "rope.scaling.original_context_length": np.uint32(_rope(config).count(_ORIGINAL, "context")),
        "attention.sliding_window": np.uint32(one_window(config, sizes, window)),
    }


def _described(file: GGUFFile, spec: ModelSpec, _said: dict[str, Any]) -> dict[str, Any]:
    header = Header(file, "phi3")
    return {
        _ORIGINAL: header.count("rope.scaling.original_context_length", "context", default=spec.context),
        "partial_rotary_factor": spec.rope_dim / spec.head_dim,
        "sliding_window": spec.window or None,
    }


PHI3 = Architecture(
    name="phi3",
    model=("phi3", "Phi3ForCausalLM"),
    # The size of heads is hidden_size / num_attention_heads, and not written.
    settings=(
        *(replace(each, written=each.theirs != "head_dim") for each in changed(USUAL, rms_norm_eps=1e-5)), SILU,
    ),
    names=_NAMES,
    others=_others,
    described=_described,
    rope=_rope,
    partial_rope=True,
)  # fmt: skip
