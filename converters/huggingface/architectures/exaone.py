"""EXAONE 4: norms of heads, and norms behind each block alone; the 32B has windows in three of four layers."""

from __future__ import annotations

from functools import partial

from edge.converters.huggingface.architectures.common import (
    HEAD_NORMS,
    LLAMA_NAMES,
    Architecture,
    described_windows,
    in_layers,
    window_but_every,
    without,
)
from edge.converters.huggingface.architectures.llama import llama_rope
from edge.model.architectures.exaone4 import PERIOD

EXAONE4 = Architecture(
    name="exaone4",
    model=("exaone4", "Exaone4ForCausalLM"),
    others=partial(window_but_every, PERIOD),
    described=lambda _file, spec, _said: described_windows(PERIOD, spec),
    names=without(LLAMA_NAMES, "attn_norm", "ffn_norm")
    | HEAD_NORMS
    | in_layers({"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}),
    rope=llama_rope,
)
