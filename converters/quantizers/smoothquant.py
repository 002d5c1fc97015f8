"""SmoothQuant (arXiv:2211.10438): move the difficulty of int8 rounding from inputs with outliers to the weights.

Channel i of the inputs is divided by s_i = max|x_i|^α / max|w_i|^(1 − α), and column i of the weights multiplied by it:
nothing else changes. The division is folded into the producer of the inputs: the norm before attention and
feed-forward; the rows of `ffn_up` for `ffn_down`, in networks with a gate; the rows of `attn_v` for `attn_output`, with
one factor for all query heads of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from edge.converters.quantizers.awq import makers
from edge.formats.blocks import dequantize
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import Source, find_network, find_tensors
from edge.types import FloatArray

ALPHA = 0.5  # the paper's
_SLICE = 1 << 20  # weights read at a time


@dataclass(frozen=True)
class Smoothing:
    """Factors that smooth a model, by the names of `find_tensors`."""

    multiplied: dict[str, FloatArray] = field(default_factory=dict)  # columns of matrices, float32 [columns]
    divided: dict[str, FloatArray] = field(default_factory=dict)  # values of norms, or rows of matrices, float32 [rows]


def smooth(
    file: GGUFFile,
    spec: ModelSpec,
    largest: Mapping[str, FloatArray],
    alpha: float = ALPHA,
) -> Smoothing:
    """Compute the factors. largest: max |input| of each matrix's columns in calibration, float32 [columns], by the
    names of `find_tensors`.

    Raises UnsupportedError for weights that cannot be read.
    """
    network, found, smoothing = find_network(spec), find_tensors(file, spec), Smoothing()
    for layer, blocks in enumerate(network.layers):
        at = f"blk.{layer}."
        for maker, names in makers(blocks).items():
            weights = np.max([_column_sizes(file, found[at + name]) for name in names], axis=0)
            inputs = largest[at + names[0]]
            if maker == "attn_v":
                inputs, weights = (_of_group(each, spec) for each in (inputs, weights))
            factors = factors_of(inputs, weights, alpha)
            smoothing.divided[at + maker] = factors
            if f"{at}{maker}.bias" in found:
                smoothing.divided[f"{at}{maker}.bias"] = factors
            factors = _to_heads(factors, spec) if maker == "attn_v" else factors
            smoothing.multiplied.update(dict.fromkeys((at + name for name in names), factors))
    return smoothing


def factors_of(inputs: FloatArray, weights: FloatArray, alpha: float = ALPHA) -> FloatArray:
    """The paper's formula; 1 for unused channels. Both arguments: max |…| of each channel, float32 [columns]."""
    used = (inputs > 0) & (weights > 0)
    factors = np.where(used, inputs, 1) ** alpha / np.where(used, weights, 1) ** (1 - alpha)
    return np.asarray(factors, np.float32)


def _column_sizes(file: GGUFFile, source: Source) -> FloatArray:
    """max |w| of each column, float32 [columns]."""
    info = file.tensors[source.tensor]
    raw = file.tensor_bytes(info).reshape(info.shape[-1], -1)[source.first : source.first + source.rows]
    sizes, step = np.zeros(info.shape[0], np.float32), max(1, _SLICE // info.shape[0])
    for first in range(0, len(raw), step):
        sizes = np.maximum(sizes, np.abs(dequantize(raw[first : first + step], info.type)).max(axis=0))
    return sizes


def _of_group(sizes: FloatArray, spec: ModelSpec) -> FloatArray:
    """The largest of the query heads that share a KV head, [KV heads · head]."""
    return np.asarray(sizes.reshape(spec.kv_heads, -1, spec.head_dim).max(axis=1).reshape(-1))


def _to_heads(factors: FloatArray, spec: ModelSpec) -> FloatArray:
    """The factors repeated for each query head of the group, [heads · head]."""
    by_group = factors.reshape(spec.kv_heads, 1, spec.head_dim)
    return np.repeat(by_group, spec.heads // spec.kv_heads, axis=1).reshape(-1)
