"""What follows the pooling of a text's states p: an embedding model's dense layers, or a reranker's classifier.

embedding   dense_3 · (dense_2 · p)
scores      cls.output · norm(activation(cls · p))      each matrix with a bias, if it has one
"""

from __future__ import annotations

import math

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.formats.gguf_fields import Header
from edge.model.cores import Tensor
from edge.model.structure.layers import DENSE, RANKS, Network, Pooling
from edge.types import AnyArray

LABELS = "classifier.output_labels"
POOLING = "classifier.pooling"  # of the states that a classifier reads; llama.cpp has no field for it
_YES = "yes"  # the label of an answer's probability
_erf = np.vectorize(math.erf, otypes=[np.float64])


def describe(header: Header, hidden: int) -> tuple[Tensor, ...]:
    """The tensors behind the pooling, as far as the file has them. Raises ModelFormatError."""
    tensors, found, size = header.file.tensors, list[Tensor](), hidden
    for name in DENSE:
        if f"{name}.weight" in tensors:
            wide, long = (header.count(f"{name}_feat_{end}", "ffn", default=hidden) for end in ("in", "out"))
            if wide != size:
                raise ModelFormatError(f"{header.file.path}: {name} reads {wide} values, and gets {size}")
            size = long
            found.append(Tensor(name, long, wide))
            found += [Tensor(f"{name}.bias", long)] * (f"{name}.bias" in tensors)
    last = next((name for name in ("cls.output", "cls") if f"{name}.weight" in tensors), None)
    for name, rows in (("cls", hidden), ("cls.norm", 0), ("cls.output", hidden)):
        if f"{name}.weight" not in tensors:
            continue
        rows = _labels(header, f"{name}.weight") if name == last else rows
        found.append(Tensor(name, rows, hidden, bits="all") if rows else Tensor(name, hidden))
        if f"{name}.bias" in tensors:
            found.append(Tensor(f"{name}.bias", rows or hidden))
    return tuple(found)


def read_ranking(header: Header, *, encoder: bool) -> Pooling | None:
    """How the states that a classifier reads are pooled; None if the file is no reranker."""
    if header.value("pooling_type") != RANKS:
        return None
    if not any(f"{name}.weight" in header.file.tensors for name in ("cls", "cls.output")):
        raise UnsupportedError(f"{header.file.path}: pooling {RANKS} is a reranker's, but it has no cls.output.weight")
    if header.text(POOLING, "") == "mean":
        return "mean"
    return "cls" if encoder else "last"


def _labels(header: Header, name: str) -> int:
    key = f"{header.architecture}.{LABELS}"
    if key in header.file.metadata:
        return header.file.count(key)
    shape = header.file.tensors[name].shape
    return shape[1] if len(shape) == 2 else 1


class Tail:
    """The matrices in float32: `values`, by name. size: values of an embedding. labels: of a classifier; none without
    one."""

    def __init__(self, file: GGUFFile, network: Network) -> None:
        self._network = network
        self.values = {tensor.name: _read(file, tensor) for tensor in network.tail}
        self.size = next((len(self.values[name]) for name in reversed(DENSE) if name in self.values), network.hidden)
        classifies = next((name for name in ("cls.output", "cls") if name in self.values), None)
        count = len(self.values[classifies]) if classifies else 0
        key = f"{file.metadata.get('general.architecture')}.{LABELS}"
        self.labels = tuple(file.strings(key)) if count and key in file.metadata else ("",) * count

    def embed(self, pooled: AnyArray) -> AnyArray:
        """The embedding of a text, [size], from its pooled states, [hidden]."""
        for name in DENSE:
            pooled = self._product(name, pooled)
        return pooled

    def score(self, pooled: AnyArray) -> float:
        """The relevance of a pair of texts, from 0 to 1: the sigmoid of a single label's score, or the share of "yes".
        Raises UnsupportedError for other labels."""
        x, output = pooled, "cls.output" in self.values
        if "cls" in self.values:
            x = _gelu(self._product("cls", x)) if self._gelu else np.tanh(self._product("cls", x))
        if "cls.norm" in self.values:
            centred = x - x.mean()
            x = centred / np.sqrt(np.mean(centred**2) + self._network.norm_eps) * self.values["cls.norm"]
            x = x + self.values.get("cls.norm.bias", 0.0)
        x = self._product("cls.output", x) if output else x
        if x.size == 1:
            return float(1 / (1 + np.exp(-x[0])))
        if _YES not in self.labels:
            raise UnsupportedError(f"a classifier with {x.size} labels ({', '.join(self.labels):.80}) ranks no texts")
        powers = np.exp(x - x.max())
        return float(powers[self.labels.index(_YES)] / powers.sum())

    @property
    def _gelu(self) -> bool:
        return self._network.classifier == "gelu_erf"

    def _product(self, name: str, x: AnyArray) -> AnyArray:
        if name not in self.values:
            return x
        return np.asarray(self.values[name] @ x + self.values.get(f"{name}.bias", 0.0))


def _gelu(x: AnyArray) -> AnyArray:
    return np.asarray(x / 2 * (1 + _erf(x / math.sqrt(2))))


def _read(file: GGUFFile, tensor: Tensor) -> AnyArray:
    info = file.tensors[tensor.name if tensor.name.endswith(".bias") else f"{tensor.name}.weight"]
    data = file.tensor_bytes(info).reshape(info.elements // info.shape[0], -1)
    return dequantize(data, info.type).reshape((tensor.rows, tensor.columns) if tensor.columns else -1)
