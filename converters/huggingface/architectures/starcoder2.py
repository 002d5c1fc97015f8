"""StarCoder 2: LayerNorm, biases everywhere, GELU without a gate. The small models have a sliding window."""

from __future__ import annotations

from functools import partial

import numpy as np

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    LLAMA_NAMES,
    USUAL,
    Architecture,
    Sizes,
    in_layers,
    one_window,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed, Number
from edge.converters.huggingface.config import Config
from edge.formats.gguf_writer import Field


def _others(config: Config, sizes: Sizes) -> dict[str, Field]:
    said = config.get("sliding_window")
    window = one_window(config, sizes, config.count("sliding_window", "context") if said else 0)
    return {"attention.sliding_window": np.uint32(window)} if window else {}


STARCODER2 = Architecture(
    name="starcoder2",
    model=("starcoder2", "Starcoder2ForCausalLM"),
    settings=(
        *USUAL[:-1], Number("norm_epsilon", ("attention.layer_norm_epsilon",), 1e-5),
        Fixed("hidden_act", "gelu_pytorch_tanh", written=True),
    ),
    others=_others,
    described=lambda _file, spec, _said: {"sliding_window": spec.window or None},
    names=without(LLAMA_NAMES, "ffn_gate") | in_layers({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
    biases=frozenset(("attn_norm", "ffn_norm", "output_norm")),
    maybe_biases={"use_bias": frozenset((*ATTENTION_BIASES, "ffn_up", "ffn_down"))},
    rope=partial(read_rope, scalings=("default", "linear", "yarn")),
    tied=True,
)  # fmt: skip
