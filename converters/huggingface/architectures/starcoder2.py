"""StarCoder 2: LayerNorm, biases everywhere, GELU without a gate. The small models have a sliding window."""

from __future__ import annotations

from functools import partial

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    in_layers,
    window_fields,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed, Number

STARCODER2 = Architecture(
    name="starcoder2",
    model=("starcoder2", "Starcoder2ForCausalLM"),
    settings=(
        *USUAL[:-1], Number("norm_epsilon", ("attention.layer_norm_epsilon",), 1e-5),
        Fixed("hidden_act", "gelu_pytorch_tanh", written=True),
    ),
    others=window_fields,
    described=lambda _file, spec, _said: {"sliding_window": spec.window or None},
    names=without(LLAMA_NAMES, "ffn_gate") | in_layers({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    biases=frozenset(("attn_norm", "ffn_norm", "output_norm")),
    maybe_biases={"use_bias": frozenset((*ATTENTION_BIASES, "ffn_up", "ffn_down"))},
    rope=partial(read_rope, scalings=("default", "linear", "yarn")),
    tied=True,
)  # fmt: skip
