"""The queries that a model is likely to have: their mean and covariance before RoPE, of every layer and KV head.

They are measured once for a model (reference/queries.py). A cache rotates them to where the next tokens will be.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from edge.backends.rope import Rotation, rotate
from edge.kv.policy import Gaussian
from edge.model.cores import Attention
from edge.model.layers import Network
from edge.types import AnyArray, FloatArray

AHEAD = 512  # positions of coming queries, over which their rotation is averaged


@dataclass(frozen=True)
class QueryMoments:
    """Of layers with rows of their own, float16 [KV heads, 1 + head, head]: the mean, then the covariance, scaled as
    queries are. Query heads that share a KV head count as one. Values of a head lie as in the model's file."""

    network: Network
    layers: dict[int, AnyArray]

    @classmethod
    def of(cls, network: Network, values: AnyArray) -> QueryMoments:
        """From the moments of all layers, one behind the other."""
        return cls(network, split_layers(values, _shapes(network)))

    def ahead_of(self, position: int, rotation: Rotation, layer: int, head: int) -> Gaussian:
        """The queries of the tokens from `position` on, in an engine with such a rotation and heads of such a size."""
        kept = np.asarray(self.layers[layer], np.float32)
        core = self.network.attention[layer]
        assert core is not None
        order = order_of(core, rotation, self.network.halves)
        mean, covariance = kept[:, 0, order], kept[:, 1 + order[:, None], order]
        padding = (0, head - len(order))
        mean = np.pad(mean, ((0, 0), padding))
        covariance = np.pad(covariance, ((0, 0), padding, padding))
        tables = rotation.tables(rotation.kinds[layer], position + np.arange(AHEAD))
        cos, sin = (each.mean(axis=0, keepdims=True) for each in tables)

        def rotated(x: FloatArray) -> FloatArray:
            return rotate(x, cos, sin, halves=rotation.halves)

        return Gaussian(rotated(mean), rotated(rotated(covariance).swapaxes(-1, -2)))


def moments_bytes(network: Network) -> int:
    return 2 * sum(map(prod, _shapes(network).values()))


def _shapes(network: Network) -> dict[int, tuple[int, ...]]:
    return {layer: (core.kv_heads, 1 + core.head_dim, core.head_dim) for layer, core in cores_with_rows(network)}


def cores_with_rows(network: Network) -> Iterator[tuple[int, Attention]]:
    """Attention layers that have KV rows of their own."""
    for layer, core in enumerate(network.attention):
        if core is not None and core.row_values:
            yield layer, core


def split_layers(values: AnyArray, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, AnyArray]:
    """Arrays of such shapes by layer, from the values of all, one behind the other."""
    layers, at = {}, 0
    for layer, shape in shapes.items():
        layers[layer] = values[at : at + prod(shape)].reshape(shape)
        at += prod(shape)
    return layers


def order_of(core: Attention, rotation: Rotation, halves: bool) -> AnyArray:
    """For each value of an engine's head, its place in the file's: pairs may lie otherwise; the others keep their
    order."""
    head, pairs = core.head_dim, core.rope.dim // 2

    def ends(width: int, *, halves: bool) -> AnyArray:
        first = np.arange(pairs)
        return np.concatenate([first, first + width] if halves else [2 * first, 2 * first + 1])

    here, there = ends(rotation.pairs, halves=rotation.halves), ends(pairs, halves=halves)
    order, every = np.zeros(head, np.intp), np.arange(head)
    order[here] = there
    order[np.setdiff1d(every, here)] = np.setdiff1d(every, there)
    return order
