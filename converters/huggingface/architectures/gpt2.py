"""GPT-2: LayerNorm, learned positions, biases everywhere, transposed matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from edge.converters.huggingface.architectures.common import Architecture, Sizes, short, size_fields
from edge.converters.huggingface.config import Config
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

_IN_LAYERS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _sizes(config: Config) -> Sizes:
    hidden, heads = config.count("n_embd", "hidden"), config.count("n_head", "heads")
    return Sizes(
        layers=config.count("n_layer", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=max(1, hidden // heads),
        ffn=config.count("n_inner", "ffn", default=4 * hidden),
        vocab=config.count("vocab_size", "vocab"),
        context=config.count("n_positions", "context"),
    )


def _fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    config.must_be("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.must_be("scale_attn_weights", True)
    config.must_be("scale_attn_by_inverse_layer_idx", False)
    config.must_be("add_cross_attention", False)
    epsilon = np.float32(config.positive("layer_norm_epsilon", 1e-5))
    return size_fields(sizes) | {"attention.layer_norm_epsilon": epsilon}


def _described(_file: GGUFFile, spec: ModelSpec) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": spec.layers,
        "n_embd": spec.hidden,
        "n_head": spec.heads,
        "n_inner": spec.ffn,
        "n_positions": spec.context,
        "n_ctx": spec.context,
        "layer_norm_epsilon": short(spec.norm_eps),
        "activation_function": "gelu_new",
    }


GPT2 = Architecture(
    name="gpt2",
    root="transformer.",
    names={
        "token_embd": "wte",
        "position_embd": "wpe",
        **{f"blk.{{}}.{ours}": f"h.{{}}.{theirs}" for ours, theirs in _IN_LAYERS.items()},
        "output_norm": "ln_f",
        "output": "lm_head",
    },
    sizes=_sizes,
    fields=_fields,
    described=_described,
    layouts=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
    biases=frozenset((*_IN_LAYERS, "output_norm")),
    tied=True,
)
