"""Encoders: BERT, XLM-R, whose first positions are not used, and ModernBERT; as rerankers with a classifier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from edge.converters.huggingface.architectures.common import Architecture, Sizes, in_layers
from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors, rows_from
from edge.errors import UnsupportedError
from edge.formats.gguf_writer import Field
from edge.model.architectures.bert import TOKEN_TYPES
from edge.model.architectures.modern_bert import PERIOD
from edge.model.structure.layers import RANKS
from edge.model.structure.tail import LABELS, POOLING

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


def labels(config: Config) -> dict[str, Field]:
    """The classifier of a reranker, if the checkpoint is one. Raises UnsupportedError for other classifiers."""
    if not is_classifier(config):
        return {}
    names = config.get("id2label") or {"0": "LABEL_0"}
    count = len(names) if isinstance(names, dict) else 0
    if count != 1:
        raise UnsupportedError(f"{config.path}: a classifier with {count} labels ranks no texts: one is supported")
    return {LABELS: [str(*names.values())], "pooling_type": np.uint32(RANKS)}


def is_classifier(config: Config) -> bool:
    """Whether the checkpoint has a classifier."""
    return any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures", []))


def _others(config: Config, _sizes: Sizes) -> dict[str, Field]:
    return {
        "attention.causal": False,
        "pooling_type": np.uint32(1),  # the mean, unless sentence-transformers' modules say otherwise
        TOKEN_TYPES: np.uint32(config.count("type_vocab_size", "vocab", 2)),
        **labels(config),
    }


def with_tail(tensors: Tensors, config: Config, classifier: Mapping[str, str]) -> Tensors:
    """Rename the modules of a classifier, so that they stand beside the others; without one, leave them out."""
    root = next((name.partition("embeddings.")[0] for name in tensors if "embeddings." in name), "")
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        ours = next((ours for end, ours in classifier.items() if module in (end, f"{root}{end}")), None)
        if ours is None:
            found[name] = tensor
        elif is_classifier(config):
            found[f"{root}{ours}.{suffix}"] = tensor
    return found


_NAMES = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    **{f"blk.{{}}.{ours}": f"encoder.layer.{{}}.{theirs}" for ours, theirs in _IN_LAYERS.items()},
}
TAIL = {name: f"tail.{name}" for name in ("cls", "cls.norm", "cls.output")}
BERT = Architecture(
    name="bert",
    settings=_SETTINGS,
    others=_others,
    root="",
    names=_NAMES | TAIL,
    prepare=partial(with_tail, classifier={"pooler.dense": TAIL["cls"], "classifier": TAIL["cls.output"]}),
    biases=frozenset((*_IN_LAYERS, "token_embd_norm")),
    tied=True,
)


def _unused(config: Config) -> int:
    """Rows of the table of positions before the first one that is used."""
    return config.count("pad_token_id", "vocab", 1) + 1


def _behind_padding(tensors: Tensors, config: Config) -> Tensors:
    classifier = {"classifier.dense": TAIL["cls"], "classifier.out_proj": TAIL["cls.output"], "pooler.dense": "pooler"}
    tensors, first = with_tail(tensors, config, classifier), _unused(config)
    return {
        name: rows_from(tensor, first) if name.endswith("embeddings.position_embeddings.weight") else tensor
        for name, tensor in tensors.items()
    }


XLM_ROBERTA = replace(
    BERT,
    settings=(
        *(each for each in _SETTINGS if each.theirs != "max_position_embeddings"),
        Count("", ("context_length",), "context",
              lambda config: max(1, config.count("max_position_embeddings", "context") - _unused(config))),
    ),
    prepare=_behind_padding,
)  # fmt: skip

_MODERN_IN_LAYERS = {
    "attn_norm": "attn_norm", "attn_qkv": "attn.Wqkv", "attn_output": "attn.Wo",
    "ffn_norm": "mlp_norm", "ffn_up": "mlp.Wi", "ffn_down": "mlp.Wo",
}  # fmt: skip
_ROPES = {"freq_base": ("full_attention", "global_rope_theta", 160_000.0),
          "freq_base_swa": ("sliding_attention", "local_rope_theta", 10_000.0)}  # fmt: skip


def _modern_others(config: Config, sizes: Sizes) -> dict[str, Field]:
    period = config.count("global_attn_every_n_layers", "layers", PERIOD)
    types = ["sliding_attention" if layer % period else "full_attention" for layer in range(sizes.layers)]
    if config.get("layer_types", types) != types:
        raise UnsupportedError(
            f"{config.path}: layer_types must have full_attention in every n-th layer from the first"
        )
    fields: dict[str, Field] = {
        "attention.causal": False, "pooling_type": np.uint32(1), "rope.dimension_count": np.uint32(sizes.head_dim),
        "attention.sliding_window_pattern": np.uint32(period),
    }  # fmt: skip
    parameters = config.part("rope_parameters")
    for name, (kind, key, usual) in _ROPES.items():
        part = parameters.part(kind) if parameters else None
        if part:
            part.must_be("rope_type", "default")
        theta = part.positive("rope_theta", usual) if part else config.positive(key, usual)
        fields[f"rope.{name}"] = np.float32(theta)
    if is_classifier(config):
        config.must_be("classifier_activation", "gelu")
        fields[POOLING] = str(config.get("classifier_pooling", "cls"))
    return fields | labels(config)


MODERN_BERT = Architecture(
    name="modern-bert",
    settings=(
        *(each for each in _SETTINGS if isinstance(each, Count)),
        Number("norm_eps", ("attention.layer_norm_epsilon",), 1e-5),
        Count("local_attention", ("attention.sliding_window",), "context", 128),
        *(Fixed(key, False) for key in ("norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "is_decoder")),
        Fixed("hidden_activation", "gelu"),
    ),
    others=_modern_others,
    root="",
    names={
        "token_embd": "embeddings.tok_embeddings",
        "token_embd_norm": "embeddings.norm",
        **in_layers(_MODERN_IN_LAYERS),
        "output_norm": "final_norm",
        **TAIL,
    },
    prepare=partial(
        with_tail,
        classifier={
            "head.dense": TAIL["cls"], "head.norm": TAIL["cls.norm"], "classifier": TAIL["cls.output"],
            "decoder": "decoder",
        },
    ),
    tied=True,
)  # fmt: skip
