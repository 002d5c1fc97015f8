"""GLM 4 of 2024, which is also GLM-Edge, and GLM 4 of 2025, which has norms behind each block, too.

Gate and up are one matrix, and RoPE rotates neighbours, so that GGUF keeps the order of rows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from edge.converters.huggingface.architectures.common import (
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    in_layers,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import changed

_NAMES = without(LLAMA_NAMES, "ffn_gate") | in_layers({"ffn_up": "mlp.gate_up_proj"})

GLM = Architecture(
    name="chatglm",
    model=("glm", "GlmForCausalLM"),
    settings=(*changed(USUAL, rms_norm_eps=1.5625e-07), SILU),
    described=lambda _file, spec, _said: {"partial_rotary_factor": spec.rope_dim / spec.head_dim},
    names=_NAMES,
    maybe_biases={"attention_bias": frozenset(("attn_q", "attn_k", "attn_v"))},
    rope=partial(read_rope, scalings=("default", "linear", "yarn"), default_share=0.5),
    partial_rope=True,
)
GLM4 = replace(
    GLM,
    name="glm4",
    model=("glm4", "Glm4ForCausalLM"),
    names=_NAMES
    | in_layers({"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}),
)
