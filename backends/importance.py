"""The importance of KV rows, predicted from a row itself: a linear model of every KV head, fitted once for a model
(reference/importance.py) and kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from edge.backends.rope import Rotation
from edge.kv.policy import Needs
from edge.model.cores import Attention
from edge.model.layers import Network
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

_EXTRA = 3  # the two norms' weights, and the bias
_LARGEST = 80.0  # of a logarithm: its exponential is finite


@dataclass(frozen=True)
class RowImportance:
    """Of layers without windows, float32 [KV heads, head + 3]: weights of `features`, then the bias. Values of a head
    lie as in the model's file."""

    network: Network
    layers: dict[int, FloatArray]

    @classmethod
    def of(cls, network: Network, values: AnyArray) -> RowImportance:
        """From the weights of all layers, one behind the other."""
        layers, at = {}, 0
        for layer, shape in _shapes(network).items():
            layers[layer] = values[at : at + prod(shape)].reshape(shape)
            at += prod(shape)
        return cls(network, layers)

    def predict(
        self, keys: FloatArray, positions: IntArray, norms: FloatArray, rotation: Rotation, layer: int, head: int
    ) -> FloatArray:
        """The importance of a KV head's rows, float32 [n], above 0, which all heads of the model share as a measure.

        keys: as an engine with such a rotation stores them, [n, its head]. positions: RoPE's. norms: of values, [n].
        """
        core, own = self.network.attention[layer], self.layers[layer][head]
        assert core is not None
        plain = rotation.rotate_cached(keys, -positions, layer)
        weights = np.concatenate([own[_order_of(core, rotation, self.network.halves)], own[core.head_dim :]])
        found = features(plain[:, : core.head_dim], norms) @ weights[:-1] + weights[-1]
        return np.asarray(np.exp(np.minimum(found, np.float32(_LARGEST))), np.float32)


def features(keys: FloatArray, norms: FloatArray) -> FloatArray:
    """Keys before RoPE, [..., n, head], and behind them the logarithms of their norms and of their values' norms, both
    [..., n]."""
    both = np.stack([np.linalg.norm(keys, axis=-1), norms], axis=-1)
    return np.concatenate([keys, np.log(both + np.float32(1e-6))], axis=-1)


def ranked_cores(network: Network) -> Iterator[tuple[int, Attention]]:
    """Attention layers without a window: the rows that policies evict."""
    for layer, core in enumerate(network.attention):
        if core is not None and core.row_values and not core.window:
            yield layer, core


def importance_bytes(network: Network) -> int:
    """The size of all its linear models."""
    return 4 * sum(map(prod, _shapes(network).values()))


def ranking_bytes(spec: ModelSpec, needs: Needs) -> int:
    """Memory beside the rows in a session of a policy: the linear models, if it ranks by them."""
    return importance_bytes(find_network(spec)) if needs.ranks else 0


def _shapes(network: Network) -> dict[int, tuple[int, ...]]:
    return {layer: (core.kv_heads, core.head_dim + _EXTRA) for layer, core in ranked_cores(network)}


def _order_of(core: Attention, rotation: Rotation, halves: bool) -> AnyArray:
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
