"""ModelSpec: a model's architecture as data, read from a checked GGUF header."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from edge.errors import ModelFormatError, UnsupportedError
from edge.gguf_file import ArrayRef, GGUFFile

# Bounds on what a header may claim; generous for any model that could run on a device, tight enough that no
# product of two of them overflows what an engine multiplies.
_LIMITS = {"layers": 1024, "hidden": 1 << 17, "heads": 1024, "head_dim": 1024, "ffn": 1 << 20, "context": 1 << 27}


@dataclass(frozen=True)
class ModelSpec:
    """What engines and plans need to know of a model. Counts are numbers of values, sizes are bytes."""

    architecture: str
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int  # positions the model was trained for
    norm_eps: float
    rope_base: float
    rope_dim: int
    rope_scaled: bool  # positions are stretched by factors in the file (llama3, yarn, linear ...)
    tied_head: bool  # the output head is the token embedding
    parameters: int
    weight_bytes: int
    largest_tensor: int  # bytes
    weight_type: str  # the block type that holds most of the parameters, such as Q4_1

    @property
    def kv_values_per_row(self) -> int:
        """Values of K and V that one token adds to the KV cache, all layers together."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def label(self) -> str:
        """How benchmarks name the model: `llama 135M Q4_1`."""
        return f"{self.architecture} {format_count(self.parameters)} {self.weight_type}"


def format_count(count: int) -> str:
    """134515008 -> `135M`, 1540000000 -> `1.5B`."""
    if count >= 1e9:
        return f"{count / 1e9:.1f}B"
    return f"{count / 1e6:.0f}M" if count >= 1e7 else f"{count / 1e6:.1f}M"


def read_spec(file: GGUFFile) -> ModelSpec:
    """The architecture of a GGUF file, with every figure checked against its tensors.

    Raises ModelFormatError if figures are missing, impossible or contradict the tensors; UnsupportedError if
    the model is not a decoder with attention in every layer.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture.isascii() or not architecture.isprintable():
        raise ModelFormatError(f"{file.path}: general.architecture is missing: this is not a model")
    if "token_embd.weight" not in file.tensors:
        raise ModelFormatError(f"{file.path}: has no token_embd.weight: a vocabulary or adapter, not a whole model")

    embedding = file.tensors["token_embd.weight"]
    if len(embedding.shape) != 2:
        raise ModelFormatError(f"{file.path}: token_embd.weight has {len(embedding.shape)} dimensions instead of 2")
    hidden, vocab = embedding.shape
    layers = _count(file, architecture, "block_count", "layers")
    heads = _count(file, architecture, "attention.head_count", "heads")
    kv_heads = _count(file, architecture, "attention.head_count_kv", "heads", default=heads)
    if hidden != _count(file, architecture, "embedding_length", "hidden"):
        raise ModelFormatError(f"{file.path}: embedding_length differs from the width of token_embd.weight ({hidden})")
    if heads % kv_heads:
        raise ModelFormatError(f"{file.path}: {heads} heads cannot share {kv_heads} KV heads")
    head_dim = _count(file, architecture, "attention.key_length", "head_dim", default=hidden // heads)
    if head_dim != _count(file, architecture, "attention.value_length", "head_dim", default=head_dim):
        raise UnsupportedError(f"{file.path}: keys and values of different sizes are not supported yet")
    if file.metadata.get(f"{architecture}.vocab_size", vocab) != vocab:
        raise ModelFormatError(f"{file.path}: vocab_size differs from the rows of token_embd.weight ({vocab})")

    expected = {
        "attn_q.weight": (hidden, heads * head_dim),
        "attn_k.weight": (hidden, kv_heads * head_dim),
        "attn_v.weight": (hidden, kv_heads * head_dim),
        "attn_output.weight": (heads * head_dim, hidden),
    }
    for layer in range(layers):
        if not any(f"blk.{layer}.{name}" in file.tensors for name in ("attn_q.weight", "attn_qkv.weight")):
            raise UnsupportedError(f"{file.path}: layer {layer} has no attention ({architecture}): not supported yet")
        for name, shape in expected.items():
            found = file.tensors.get(f"blk.{layer}.{name}")
            if found is not None and found.shape != shape:
                raise ModelFormatError(f"{file.path}: blk.{layer}.{name} has shape {found.shape} instead of {shape}")

    scaling = str(file.metadata.get(f"{architecture}.rope.scaling.type", "none"))
    tensors = file.tensors.values()
    values_by_type: dict[str, int] = {}
    for tensor in tensors:
        values_by_type[tensor.type] = values_by_type.get(tensor.type, 0) + tensor.elements
    return ModelSpec(
        architecture=architecture,
        name=str(file.metadata.get("general.name", file.path.stem)),
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=_count(file, architecture, "feed_forward_length", "ffn", default=4 * hidden),
        vocab=vocab,
        context=_count(file, architecture, "context_length", "context", default=2048),
        norm_eps=_positive(file, architecture, "attention.layer_norm_rms_epsilon", 1e-5, below=1.0),
        rope_base=_positive(file, architecture, "rope.freq_base", 10000.0, below=1e12),
        rope_dim=min(_count(file, architecture, "rope.dimension_count", "head_dim", default=head_dim), head_dim),
        rope_scaled=scaling not in ("none", "") or "rope_freqs.weight" in file.tensors,
        tied_head="output.weight" not in file.tensors,
        parameters=sum(tensor.elements for tensor in tensors),
        weight_bytes=sum(tensor.nbytes for tensor in tensors),
        largest_tensor=max(tensor.nbytes for tensor in tensors),
        weight_type=max(values_by_type, key=lambda name: values_by_type[name]),
    )


def _value(file: GGUFFile, architecture: str, key: str) -> Any:
    value = file.metadata.get(f"{architecture}.{key}")
    if isinstance(value, ArrayRef):  # some architectures give one figure per layer
        distinct = set(file.numbers(f"{architecture}.{key}").tolist())
        if len(distinct) != 1:
            raise UnsupportedError(f"{file.path}: {architecture}.{key} differs from layer to layer: not supported yet")
        return distinct.pop()
    return value


def _count(file: GGUFFile, architecture: str, key: str, kind: str, default: int | None = None) -> int:
    value = _value(file, architecture, key)
    if value is None:
        value = default
    if value is None:
        raise ModelFormatError(f"{file.path}: {architecture}.{key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LIMITS[kind]:
        raise ModelFormatError(f"{file.path}: {architecture}.{key} is {value!r}: it must be from 1 to {_LIMITS[kind]}")
    return value


def _positive(file: GGUFFile, architecture: str, key: str, default: float, below: float) -> float:
    value = _value(file, architecture, key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not math.isfinite(value) or not 0 < value < below:
        raise ModelFormatError(f"{file.path}: {architecture}.{key} is {value!r}: it must lie between 0 and {below:g}")
    return float(value)
