"""GPT-2: LayerNorm, learned positions, biases everywhere, transposed matrices."""

from __future__ import annotations

from edge.converters.huggingface.architectures.common import Architecture
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting
from edge.converters.huggingface.config import Config

_IN_LAYERS = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _hidden(config: Config) -> int:
    return config.count("n_embd", "hidden")


def _heads(config: Config) -> int:
    return config.count("n_head", "heads")


_SETTINGS: tuple[Setting, ...] = (
    Count("n_layer", ("block_count",), "layers"),
    Count("n_embd", ("embedding_length",), "hidden"),
    Count("n_head", ("attention.head_count",), "heads"),
    Count("", ("attention.head_count_kv",), "heads", _heads, written=False),
    Count("", ("attention.key_length", "attention.value_length"), "head_dim",
          lambda config: max(1, _hidden(config) // _heads(config)), written=False),
    Count("n_inner", ("feed_forward_length",), "ffn", lambda config: 4 * _hidden(config)),
    Count("vocab_size", ("vocab_size",), "vocab"),
    Count("n_positions", ("context_length",), "context"),
    Number("layer_norm_epsilon", ("attention.layer_norm_epsilon",), 1e-5),
    Fixed("activation_function", "gelu_new", ("gelu_pytorch_tanh",), written=True),
    Fixed("scale_attn_weights", True),
    Fixed("scale_attn_by_inverse_layer_idx", False),
    Fixed("add_cross_attention", False),
)  # fmt: skip
GPT2 = Architecture(
    name="gpt2",
    model=("gpt2", "GPT2LMHeadModel"),
    settings=_SETTINGS,
    described=lambda _file, spec, _said: {"n_ctx": spec.context},
    root="transformer.",
    names={
        "token_embd": "wte",
        "position_embd": "wpe",
        **{f"blk.{{}}.{ours}": f"h.{{}}.{theirs}" for ours, theirs in _IN_LAYERS.items()},
        "output_norm": "ln_f",
        "output": "lm_head",
    },
    layouts=dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), "transposed"),
    biases=frozenset((*_IN_LAYERS, "output_norm")),
    tied=True,
)
