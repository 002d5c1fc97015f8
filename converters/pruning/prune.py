"""Structured pruning: remove whole layers, or channels of the feed-forward networks, by their effect on calibration
text.

Layers: the Block Influence of ShortGPT (arXiv:2403.03853), 1 − E[cos(x, layer(x))] over tokens: the layers that change
the direction of the hidden state least are removed first. Channels: E[x²] · ‖w‖², the mean square of a channel's
contribution to the hidden state, with w its column of ffn_down: Wanda's |weight| · ‖activation‖ (arXiv:2306.11695) for
whole channels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from edge.backends.checks import usual_cores
from edge.converters.calibrate import Walk, rows_of, sequences
from edge.converters.gguf.plain import check_encoded
from edge.converters.quantizers.rtn import quantize
from edge.errors import InputError, UnsupportedError
from edge.formats.blocks import FLOATS, dequantize
from edge.formats.gguf import GGUFFile, TensorInfo
from edge.formats.gguf_writer import Field, Planned, fields_of, write_gguf
from edge.likelihood import negative_log_likelihoods
from edge.model.cores import Dense
from edge.model.structure.mtp import NEXTN_LAYERS
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.types import AnyArray, FloatArray, IntArray, Progress

_BLOCK = 32  # channels are removed in blocks, so that the rows of ffn_down can be quantized afterwards
_KEPT_IN = "F16"  # the type of quantized rows that lose columns


@dataclass(frozen=True)
class Pruning:
    """The amount to remove."""

    layers: int = 0  # number of layers
    ffn: float = 0.0  # fraction of channels, 0 … 1, rounded to whole blocks of 32


@dataclass(frozen=True)
class Importance:
    """Scores by which layers and channels are removed, lowest first."""

    layers: AnyArray  # Block Influence, float64 [layers]
    channels: AnyArray  # float64 [layers, ffn]


@dataclass(frozen=True)
class Pruned:
    """The result of pruning."""

    layers: tuple[int, ...]  # removed layers
    ffn: tuple[int, int]  # channels before and after
    parameters: tuple[int, int]  # before and after
    importance: tuple[float, ...]  # of every layer of the source


def check_pruning(spec: ModelSpec, pruning: Pruning) -> int:
    """The number of channels that stay. Raises InputError, UnsupportedError."""
    if not 0 <= pruning.layers < spec.layers:
        raise InputError(f"--prune-layers {pruning.layers}: the model has {spec.layers} layers, and one must stay")
    if not 0 <= pruning.ffn < 1:
        raise InputError(f"--prune-ffn {pruning.ffn:g}: state the share of channels that go, from 0 to below 1")
    network = find_network(spec)
    for reason in filter(None, map(usual_cores, network.cores)):
        raise UnsupportedError(f"models with {reason} cannot be pruned yet")
    if pruning.layers and len({(network.windows[at], network.rope_of(at)) for at in range(spec.layers)}) > 1:
        raise UnsupportedError(f"layers of {spec.architecture} take turns in what they see: use --prune-ffn")
    kept = round(spec.ffn * (1 - pruning.ffn) / _BLOCK) * _BLOCK
    return min(spec.ffn, max(_BLOCK, kept)) if pruning.ffn else spec.ffn


def measure_importance(
    file: GGUFFile, spec: ModelSpec, tokens: IntArray, progress: Progress | None = None
) -> Importance:
    """Measure importance on calibration tokens, int32 [n]. Raises the errors of calibrate.collect."""
    walk = Walk(file, spec, sequences(tokens))
    layers, channels = np.zeros(spec.layers), np.zeros((spec.layers, spec.ffn))
    for layer in range(spec.layers):
        before = walk.hidden.copy()
        for names, inputs in walk.layer(layer):
            if names[0].endswith(Dense.output):
                down = walk.weights[names[0]]
                rows = rows_of(inputs)
                squares = np.einsum("tc,tc->c", rows, rows, dtype=np.float64) / len(rows)
                channels[layer] = squares * np.einsum("rc,rc->c", down, down, dtype=np.float64)
        layers[layer] = 1 - _cosines(before, walk.hidden).mean()
        if progress:
            progress((layer + 1) / spec.layers)
    return Importance(layers, channels)


def prune_gguf(
    file: GGUFFile,
    spec: ModelSpec,
    target: Path,
    pruning: Pruning,
    tokens: IntArray,
    progress: Progress | None = None,
) -> Pruned:
    """Write the file without its least important layers and channels. tokens: calibration text, int32 [n].

    Raises the errors of check_pruning, measure_importance and write_gguf.
    """
    count = check_pruning(spec, pruning)
    importance = measure_importance(file, spec, tokens, progress)
    gone = sorted(np.argsort(importance.layers, kind="stable")[: pruning.layers].tolist())
    best = np.argsort(-importance.channels, axis=1, kind="stable")[:, :count]
    kept = [layer for layer in range(spec.layers) if layer not in gone]
    cuts = list(_cuts(file, spec, kept, np.sort(best)))
    fields = _fields(file, spec, len(kept), count)
    write_gguf(target, fields, [cut.planned for cut in cuts], (cut.read(file) for cut in cuts))
    parameters = sum(prod(cut.planned.shape) for cut in cuts)
    return Pruned(tuple(gone), (spec.ffn, count), (spec.parameters, parameters), tuple(importance.layers.tolist()))


def plan_pruning(file: GGUFFile, spec: ModelSpec, pruning: Pruning) -> tuple[dict[str, Field], list[Planned]]:
    """Header and tensors of the pruned file, which do not depend on the layers and channels chosen.

    Raises the errors of check_pruning.
    """
    count, layers = check_pruning(spec, pruning), spec.layers - pruning.layers
    any_channels = np.tile(np.arange(count, dtype=np.int32), (spec.layers, 1))
    planned = [cut.planned for cut in _cuts(file, spec, list(range(layers)), any_channels)]
    return _fields(file, spec, layers, count), planned


def _fields(file: GGUFFile, spec: ModelSpec, layers: int, ffn: int) -> dict[str, Field]:
    fields: dict[str, Field] = {key: value for key, value in fields_of(file).items() if key != "general.size_label"}
    fields.pop(f"{spec.architecture}.{NEXTN_LAYERS}", None)  # pruning removes such layers, too
    fields[f"{spec.architecture}.block_count"] = np.uint32(layers)
    fields[f"{spec.architecture}.feed_forward_length"] = np.uint32(ffn)
    return fields


@dataclass(frozen=True)
class _Cut:
    """A tensor of the file and its rows and columns that stay (None: all)."""

    source: TensorInfo
    planned: Planned
    rows: IntArray | None = None
    columns: IntArray | None = None

    def read(self, file: GGUFFile) -> AnyArray:
        data = file.tensor_bytes(self.source)
        if self.rows is not None:
            return np.asarray(data.reshape(self.source.shape[-1], -1)[self.rows])
        if self.columns is not None:
            values = dequantize(data.reshape(self.source.shape[-1], -1), self.source.type)
            data = quantize(values[:, self.columns], self.planned.type)
            check_encoded(file, self.source.name, dequantize(data, self.planned.type), self.planned.type)
            return data
        return data


def _cuts(file: GGUFFile, spec: ModelSpec, kept: list[int], channels: IntArray) -> Iterator[_Cut]:
    """The cut of every tensor. channels: those that stay in each layer of the source, [layers, count]."""
    for name, info in file.tensors.items():
        if not name.startswith("blk."):
            yield _Cut(info, Planned(name, info.shape, info.type))
            continue
        _, number, stem = name.split(".", 2)
        if (layer := int(number)) not in kept:
            continue
        renamed, matrix = f"blk.{kept.index(layer)}.{stem}", stem.partition(".")[0]
        if matrix in Dense(spec.ffn).inputs and channels.shape[1] < spec.ffn:
            parts = info.shape[-1] // spec.ffn  # gate and up may lie in one
            rows = np.concatenate([channels[layer] + part * spec.ffn for part in range(parts)])
            yield _Cut(info, Planned(renamed, (*info.shape[:-1], rows.size), info.type), rows=rows)
        elif stem == f"{Dense.output}.weight" and channels.shape[1] < spec.ffn:
            kind = info.type if info.type in FLOATS else _KEPT_IN
            planned = Planned(renamed, (channels.shape[1], info.shape[1]), kind)
            yield _Cut(info, planned, columns=channels[layer])
        else:
            yield _Cut(info, Planned(renamed, info.shape, info.type))


def perplexity_on(file: GGUFFile, spec: ModelSpec, tokens: IntArray) -> float:
    """Perplexity of tokens, int32 [n], in independent sequences, to compare a model with derived ones."""
    parts = sequences(tokens)
    walk = Walk(file, spec, parts)
    for layer in range(spec.layers):
        for _ in walk.layer(layer):
            pass
    nlls = []
    for number, part in enumerate(parts):
        at = number * parts.shape[1]
        nlls.append(negative_log_likelihoods(walk.logits(slice(at, at + len(part) - 1)), part[1:]))
    return float(np.exp(np.concatenate(nlls).mean()))


def _cosines(some: FloatArray, others: FloatArray) -> FloatArray:
    """Cosine similarity by row, [n]."""
    products = np.einsum("nh,nh->n", some, others)
    return np.asarray(products / np.maximum(np.linalg.norm(some, axis=1) * np.linalg.norm(others, axis=1), 1e-20))
