"""Nemotron 4 and Minitron: LayerNorm, stored as weight − 1, RoPE for a part of each head, ReLU² without a gate."""

from __future__ import annotations

from functools import partial

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed, Number

_NORMS = ("attn_norm", "ffn_norm", "output_norm")

NEMOTRON = Architecture(
    name="nemotron",
    model=("nemotron", "NemotronForCausalLM"),
    settings=(
        *USUAL[:-1], Number("norm_eps", ("attention.layer_norm_epsilon",), 1e-5),
        Fixed("hidden_act", "relu2", written=True),
    ),
    described=lambda _file, spec, _said: {"partial_rotary_factor": spec.rope_dim / spec.head_dim},
    names=without(LLAMA_NAMES, "ffn_gate"),
    layouts=dict.fromkeys(_NORMS, "plus one"),
    biases=frozenset(_NORMS),
    maybe_biases={"attention_bias": ATTENTION_BIASES, "mlp_bias": frozenset(("ffn_up", "ffn_down"))},
    rope=partial(read_rope, scalings=("default", "linear"), default_share=0.5),
    partial_rope=True,
)  # fmt: skip
