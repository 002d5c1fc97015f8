"""Command R7B: one LayerNorm for attention and feed-forward network, side by side; windows in three of four layers."""

from __future__ import annotations

from functools import partial

from edge.converters.huggingface.architectures.common import (
    ATTENTION_BIASES,
    LLAMA_NAMES,
    SILU,
    USUAL,
    Architecture,
    described_windows,
    window_but_every,
    without,
)
from edge.converters.huggingface.architectures.rope import read_rope
from edge.converters.huggingface.architectures.settings import Fixed, Number
from edge.model.architectures.cohere2 import PERIOD

COHERE2 = Architecture(
    name="cohere2",
    model=("cohere2", "Cohere2ForCausalLM"),
    settings=(
        *USUAL[:-1], SILU, Number("layer_norm_eps", ("attention.layer_norm_epsilon",), 1e-5),
        Number("logit_scale", ("logit_scale",), 0.0625), Fixed("use_qk_norm", False), Fixed("use_parallel_block", True),
    ),
    others=partial(window_but_every, PERIOD),
    described=lambda _file, spec, _said: described_windows(PERIOD, spec),
    names=without(LLAMA_NAMES, "ffn_norm"),
    maybe_biases={"attention_bias": ATTENTION_BIASES},
    rope=partial(read_rope, scalings=("default",)),
    tied=True,
)  # fmt: skip
