"""BERT: an encoder."""

from __future__ import annotations

import numpy as np

from edge.converters.huggingface.architectures.common import Architecture, Sizes
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting
from edge.converters.huggingface.config import Config
from edge.formats.gguf_writer import Field
from edge.model.architectures.bert import TOKEN_TYPES

_IN_LAYERS = {
    "attn_q": "attention.self.query",
    "attn_k": "attention.self.key",
    "attn_v": "attention.self.value",
    "attn_output": "attention.output.dense",
    "attn_output_norm": "attention.output.LayerNorm",
    "ffn_up": "intermediate.dense",
    "ffn_down": "output.dense",
    "layer_output_norm": "output.LayerNorm",
}


def _heads(config: Config) -> int:
    return config.count("num_attention_heads", "heads")


_SETTINGS: tuple[Setting, ...] = (
    Count("hidden_size", ("embedding_length",), "hidden"),
    Count("num_hidden_layers", ("block_count",), "layers"),
    Count("num_attention_heads", ("attention.head_count",), "heads"),
    Count("", ("attention.head_count_kv",), "heads", _heads),
    Count("", ("attention.key_length", "attention.value_length"), "head_dim",
          lambda config: max(1, config.count("hidden_size", "hidden") // _heads(config))),
    Count("intermediate_size", ("feed_forward_length",), "ffn"),
    Count("vocab_size", ("vocab_size",), "vocab"),
    Count("max_position_embeddings", ("context_length",), "context"),
    Number("layer_norm_eps", ("attention.layer_norm_epsilon",), 1e-12),
    Fixed("hidden_act", "gelu"),
    Fixed("position_embedding_type", "absolute"),
    Fixed("is_decoder", False),
    Fixed("add_cross_attention", False),
)  # fmt: skip


def _others(config: Config, _sizes: Sizes) -> dict[str, Field]:
    return {
        "attention.causal": False,
        "pooling_type": np.uint32(1),  # the mean, unless sentence-transformers' modules say otherwise
        TOKEN_TYPES: np.uint32(config.count("type_vocab_size", "vocab", 2)),
    }


BERT = Architecture(
    name="bert",
    settings=_SETTINGS,
    others=_others,
    root="",
    names={
        "token_embd": "embeddings.word_embeddings",
        "position_embd": "embeddings.position_embeddings",
        "token_types": "embeddings.token_type_embeddings",
        "token_embd_norm": "embeddings.LayerNorm",
        **{f"blk.{{}}.{ours}": f"encoder.layer.{{}}.{theirs}" for ours, theirs in _IN_LAYERS.items()},
    },
    biases=frozenset((*_IN_LAYERS, "token_embd_norm")),
    tied=True,
)
