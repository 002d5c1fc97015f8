"""BERT: an encoder, whose folder also says how sentence-transformers pools its states."""

from __future__ import annotations

from pathlib import Path
from reprlib import repr as brief

import numpy as np

from edge.converters.huggingface.architectures.common import Architecture, Sizes
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting
from edge.converters.huggingface.config import Config
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf_writer import Field
from edge.formats.json_file import read_list, read_object
from edge.model.architectures.bert import POOLING, TOKEN_TYPES

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
_MODULES, _POOLING_MODES = "modules.json", {"mean_tokens": "mean", "cls_token": "cls", "lasttoken": "last"}


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
    pooling = _pooling(config.path.parent)
    return {
        "attention.causal": False,
        "pooling_type": np.uint32(next(number for number, name in POOLING.items() if name == pooling)),
        TOKEN_TYPES: np.uint32(config.count("type_vocab_size", "vocab", 2)),
    }


def _pooling(folder: Path) -> str:
    """The pooling of sentence-transformers' modules; the mean without them. Raises UnsupportedError,
    ModelFormatError."""
    path, where = folder / _MODULES, "1_Pooling"
    if path.is_file():
        for module in read_list(path):
            kind, place = (module.get(key) if isinstance(module, dict) else None for key in ("type", "path"))
            name = str(kind).rpartition(".")[2]
            if name not in ("Transformer", "Pooling", "Normalize"):
                raise UnsupportedError(f"{path}: the module {brief(kind)} behind an encoder is not supported")
            if name == "Pooling":
                where = str(place)
    if Path(where).name != where:
        raise ModelFormatError(f"{path}: {where!r:.80} is not the name of a folder in this one")
    path = folder / where / "config.json"
    if not path.is_file():
        return "mean"
    said = read_object(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in said.items() if key.startswith("pooling_mode_") and on]
    found = _POOLING_MODES.get(modes[0]) if len(modes) == 1 else said.get("pooling_mode") if not modes else None
    if found not in POOLING.values():
        raise UnsupportedError(f"{path}: its pooling is not supported ({', '.join(modes) or brief(found)})")
    return str(found)


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
