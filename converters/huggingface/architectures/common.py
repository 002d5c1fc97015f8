"""The description of an architecture's conversion, and the parts that families share: settings, sizes, names."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from edge.converters.huggingface.architectures.settings import Count, Fixed, Number, Setting
from edge.converters.huggingface.checkpoint import CheckpointTensor
from edge.converters.huggingface.config import Config
from edge.converters.huggingface.views import Tensors
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_writer import Field
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray

Layout = Literal["same", "interleaved", "transposed", "plus one"]
"""How GGUF stores a tensor: in Hugging Face's layout; with the rows that RoPE rotates together next to each other;
transposed; or with the 1 added that the model adds to it."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, in values; for heads, the maximum over all layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int

    @classmethod
    def of_fields(cls, fields: Mapping[str, Field]) -> Sizes:
        """The sizes in the fields of a header."""
        keys = ("block_count", "embedding_length", "attention.head_count", "attention.head_count_kv",
                "attention.key_length", "vocab_size", "context_length")  # fmt: skip
        return cls(*(int(np.max(fields[key])) for key in keys))


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


def _heads(config: Config) -> int:
    return config.count("num_attention_heads", "heads")


USUAL: tuple[Setting, ...] = (
    Count("hidden_size", ("embedding_length",), "hidden"),
    Count("num_hidden_layers", ("block_count",), "layers"),
    Count("num_attention_heads", ("attention.head_count",), "heads"),
    Count("num_key_value_heads", ("attention.head_count_kv",), "heads", _heads),
    Count("head_dim", ("attention.key_length", "attention.value_length"), "head_dim",
          lambda config: max(1, config.count("hidden_size", "hidden") // _heads(config))),
    Count("intermediate_size", ("feed_forward_length",), "ffn"),
    Count("vocab_size", ("vocab_size",), "vocab"),
    Count("max_position_embeddings", ("context_length",), "context"),
    Number("rms_norm_eps", ("attention.layer_norm_rms_epsilon",), 1e-6),
)  # fmt: skip
"""Settings of Llama's family."""
SILU = Fixed("hidden_act", "silu", written=True)


def no_others(_config: Config, _sizes: Sizes) -> dict[str, Field]:
    return {}


def nothing_else(_file: GGUFFile, _spec: ModelSpec, _said: dict[str, Any]) -> dict[str, Any]:
    return {}


def no_arrays(_tensors: Mapping[str, CheckpointTensor]) -> dict[str, AnyArray]:
    return {}


def as_they_are(tensors: Tensors, _config: Config) -> Tensors:
    return tensors


@dataclass(frozen=True)
class Architecture:
    """Settings, names and layouts of an architecture in GGUF and Hugging Face."""

    name: str  # GGUF's
    model: tuple[str, str] = ("", "")  # model_type and class under which a GGUF model is written; "": it cannot be
    settings: tuple[Setting, ...] = (*USUAL, SILU)
    others: Callable[[Config, Sizes], dict[str, Field]] = no_others  # further fields of the header, and checks
    described: Callable[[GGUFFile, ModelSpec, dict[str, Any]], dict[str, Any]] = nothing_else  # same, of config.json
    names: Mapping[str, str] = field(default_factory=lambda: LLAMA_NAMES)  # to Hugging Face's, without .weight and root
    parameters: Mapping[str, str] = field(default_factory=dict)  # names that differ in `.weight` and `.bias`, too
    root: str = "model."  # prefix of Hugging Face's tensor names
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    prepare: Callable[[Tensors, Config], Tensors] = as_they_are  # splits, stacks, reorders tensors of a checkpoint
    arrays: Callable[[Mapping[str, CheckpointTensor]], dict[str, AnyArray]] = no_arrays  # tensors of integers
    biases: frozenset[str] = frozenset()  # matrices that always have one
    maybe_biases: Mapping[str, frozenset[str]] = field(default_factory=dict)  # by setting: all have one, or none
    rope: Callable[[Config], Config] | None = None  # reads RoPE's settings; None: no RoPE
    partial_rope: bool = False  # RoPE may rotate a part of each head
    yarn_bounds: bool = False  # GGUF's readers know fields for YaRN's betas and multiplier
    tied: bool = False  # where config.json does not say
    adapts: bool = False  # `prepare` leaves matrices as adapters know them

    def theirs(self, ours: str) -> str | None:
        """Hugging Face's name of a GGUF tensor, without root; None: it has none. `*` stands for an expert's number."""
        layer = re.match(r"blk\.(\d+)\.", ours)
        stem = re.sub(r"\d+", "{}", ours, count=1) if layer else ours
        found = self.parameters.get(stem)
        if found is None:
            stem, _, suffix = stem.rpartition(".")
            found = f"{self.names[stem]}.{suffix}" if stem in self.names and suffix in ("weight", "bias") else None
        return found and found.format(layer[1] if layer else "")

    def layout(self, ours: str) -> Layout:
        """How GGUF stores the tensor of this name."""
        stem, kind = ours.split(".")[-2:]
        found = self.layouts.get(stem, "same")
        return "same" if found == "plus one" and kind == "bias" else found

    def odd_bias(self, tensors: Iterable[str], layers: int) -> str | None:
        """A matrix with a missing or unexpected bias: unlike other layers, unlike others of its group, or not allowed.
        None: none."""
        counts = Counter(name.split(".")[-2] for name in tensors if name.endswith(".bias"))
        for group in self.maybe_biases.values():
            if {counts[stem] for stem in group} not in ({0}, {layers}):
                return min(sorted(group), key=lambda stem: counts[stem])
        known = self.biases.union(*self.maybe_biases.values())
        return next((stem for stem in counts if stem not in known), None)


def without(names: Mapping[str, str], *stems: str) -> dict[str, str]:
    """The names of layers' tensors but these."""
    return {ours: theirs for ours, theirs in names.items() if not ours.endswith(tuple(f".{stem}" for stem in stems))}


def window_but_every(period: int, config: Config, sizes: Sizes) -> dict[str, Field]:
    """The sliding window of all layers but every `period`-th, or of none.

    Raises UnsupportedError if other layers have it.
    """
    said = config.get("layer_types")
    if not config.get("sliding_window") or (said and "sliding_attention" not in said):
        return {}
    if said not in (None, layer_types(period, sizes.layers)):
        raise UnsupportedError(
            f"{config.path}: layer_types: in GGUF, each {period}th layer has full attention, no other"
        )
    return {"attention.sliding_window": np.uint32(config.count("sliding_window", "context"))}


def described_windows(period: int, spec: ModelSpec) -> dict[str, Any]:
    """The settings that `window_but_every` reads."""
    types = layer_types(period, spec.layers) if spec.window else ["full_attention"] * spec.layers
    return {
        "sliding_window": spec.window or None, "sliding_window_pattern": period if spec.window else 0,
        "layer_types": types,
    }  # fmt: skip


def layer_types(period: int, layers: int) -> list[str]:
    """`layer_types` of config.json where every `period`-th layer has no window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]


def window_fields(config: Config, sizes: Sizes) -> dict[str, Field]:
    """The sliding window of all layers, if config.json states one. Raises the errors of `one_window`."""
    window = one_window(config, sizes, config.count("sliding_window", "context") if config.get("sliding_window") else 0)
    return {"attention.sliding_window": np.uint32(window)} if window else {}


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
