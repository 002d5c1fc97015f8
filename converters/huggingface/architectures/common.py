"""The description of an architecture's conversion, and the parts that families share: sizes, names, shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from edge.converters.huggingface.config import Config
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.spec import ModelSpec

Layout = Literal["same", "interleaved", "transposed", "plus one"]
"""How GGUF stores a tensor: in Hugging Face's layout; with the rows that RoPE rotates together next to each other;
transposed; or with the 1 added that the model adds to it."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, in values."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int


INTERLEAVED: dict[str, Layout] = {"attn_q": "interleaved", "attn_k": "interleaved"}
ATTENTION_BIASES = frozenset(("attn_q", "attn_k", "attn_v", "attn_output"))
FFN_BIASES = frozenset(("ffn_gate", "ffn_up", "ffn_down"))


def in_layers(names: Mapping[str, str]) -> dict[str, str]:
    """The names prefixed by `blk.{}` and `layers.{}`."""
    return {f"blk.{{}}.{ours}": f"layers.{{}}.{theirs}" for ours, theirs in names.items()}


LLAMA_NAMES = {
    "token_embd": "embed_tokens",
    **in_layers(
        {
            "attn_norm": "input_layernorm",
            "attn_q": "self_attn.q_proj",
            "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj",
            "ffn_up": "mlp.up_proj",
            "ffn_down": "mlp.down_proj",
        }
    ),
    "output_norm": "norm",
    "output": "lm_head",
}
HEAD_NORMS = in_layers({"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"})


def usual_sizes(config: Config) -> Sizes:
    """Sizes from the keys of Llama's family."""
    hidden, heads = config.count("hidden_size", "hidden"), config.count("num_attention_heads", "heads")
    return Sizes(
        layers=config.count("num_hidden_layers", "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.count("num_key_value_heads", "heads", default=heads),
        head_dim=config.count("head_dim", "head_dim", default=max(1, hidden // heads)),
        ffn=config.count("intermediate_size", "ffn"),
        vocab=config.count("vocab_size", "vocab"),
        context=config.count("max_position_embeddings", "context"),
    )


@dataclass(frozen=True)
class Architecture:
    """Names, sizes and layouts of an architecture in GGUF and Hugging Face."""

    name: str  # GGUF's
    fields: Callable[[Config, Sizes], dict[str, Field]]  # of the header, except the tokenizer's
    described: Callable[[GGUFFile, ModelSpec], dict[str, Any]]  # the config.json of a model in a GGUF file
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)  # to Hugging Face's, without .weight and root
    root: str = "model."  # prefix of Hugging Face's tensor names
    sizes: Callable[[Config], Sizes] = usual_sizes
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # fused modules and their parts as in `names`
    biases: frozenset[str] = frozenset()  # matrices that always have one
    maybe_biases: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by setting: one for all, or none
    rope: Callable[[Config], Config] | None = None  # reads RoPE's settings; None: no RoPE
    gate_in_up: bool = False  # one matrix holds the gate and ffn_up
    tied: bool = False  # where config.json does not say

    def shape(self, stem: str, sizes: Sizes) -> tuple[int, ...]:
        """The shape of a tensor, named without its layer: [out, in] for a matrix."""
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        rows = {
            "token_embd": sizes.vocab,
            "output": sizes.vocab,
            "position_embd": sizes.context,
            "attn_q": queries,
            "attn_k": keys,
            "attn_v": keys,
            "attn_qkv": queries + 2 * keys,
            "ffn_gate": sizes.ffn,
            "ffn_up": 2 * sizes.ffn if self.gate_in_up else sizes.ffn,
            "attn_q_norm": sizes.head_dim,
            "attn_k_norm": sizes.head_dim,
        }.get(stem, sizes.hidden)
        if stem.endswith("_norm"):
            return (rows,)
        return rows, {"attn_output": queries, "ffn_down": sizes.ffn}.get(stem, sizes.hidden)

    def odd_bias(self, tensors: Iterable[str], layers: int) -> str | None:
        """A matrix with a missing or unexpected bias: unlike other layers, unlike others of its group, or not allowed.
        None: none."""
        counts = Counter(name.split(".")[-2] for name in tensors if name.endswith(".bias"))
        for group in self.maybe_biases.values():
            if {counts[stem] for stem in group} not in ({0}, {layers}):
                return min(sorted(group), key=lambda stem: counts[stem])
        known = self.biases.union(*self.maybe_biases.values())
        return next((stem for stem in counts if stem not in known), None)


def one_window(config: Config, sizes: Sizes, window: int) -> int:
    """The sliding window of all layers, 0 for none: `window`, unless layer_types contradicts.

    Raises UnsupportedError if layers differ, or have a window of unknown size.
    """
    types = config.get("layer_types")
    if types is None or (window and types == ["sliding_attention"] * sizes.layers):
        return window
    if types != ["full_attention"] * sizes.layers:
        raise UnsupportedError(f"{config.path}: windows in some layers only are not supported (layer_types)")
    return 0


def size_fields(sizes: Sizes) -> dict[str, Field]:
    """Sizes as header fields."""
    counts = {
        "block_count": sizes.layers,
        "context_length": sizes.context,
        "embedding_length": sizes.hidden,
        "feed_forward_length": sizes.ffn,
        "attention.head_count": sizes.heads,
        "attention.head_count_kv": sizes.kv_heads,
        "attention.key_length": sizes.head_dim,
        "attention.value_length": sizes.head_dim,
        "vocab_size": sizes.vocab,
    }
    return {key: np.uint32(value) for key, value in counts.items()}


def usual_fields(config: Config, sizes: Sizes, *, norm_eps: float = 1e-6) -> dict[str, Field]:
    """Header fields of models with RMSNorm. norm_eps: where config.json does not say."""
    epsilon = np.float32(config.positive("rms_norm_eps", norm_eps))
    return size_fields(sizes) | {"attention.layer_norm_rms_epsilon": epsilon}


def usual_description(spec: ModelSpec) -> dict[str, Any]:
    """A GGUF model's sizes under config.json's keys."""
    return {
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context,
        "rms_norm_eps": short(spec.norm_eps),
    }


def short(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
