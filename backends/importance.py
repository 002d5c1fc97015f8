"""The importance of KV rows, predicted from the row itself by one linear model per KV head. They are fitted once for a
model (reference/importance.py) and stored in the cache folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np

from edge.backends.rope import Rotation
from edge.kv.policy import Needs
from edge.model.cores import Attention
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

EXTRA = 3  # the two norms' weights, and the bias
LARGEST = 80.0  # of a logarithm: its exponential is finite
NORM_FLOOR = 1e-6  # added to norms, whose logarithms are then finite


@dataclass(frozen=True)
class RowImportance:
    """The linear models of layers without windows, float32 [KV heads, head + 3]: weights of `features`, then the bias.
    Values of a head are in the order of the model's file."""

    network: Network
    layers: dict[int, FloatArray]

    @classmethod
    def of(cls, network: Network, values: AnyArray) -> RowImportance:
        """Split the concatenated weights of all layers, float32."""
        layers, at = {}, 0
        for layer, shape in _shapes(network).items():
            layers[layer] = values[at : at + prod(shape)].reshape(shape)
            at += prod(shape)
        return cls(network, layers)

    def ordered(self, rotation: Rotation, layer: int) -> FloatArray:
        """A layer's linear models, [KV heads, head + 3], for keys in the order of an engine with this rotation."""
        core, own = self.network.attention[layer], self.layers[layer]
        assert core is not None
        order = _order_of(core, rotation, self.network.halves)
        return np.concatenate([own[:, order], own[:, core.row.key :]], axis=1)

    def predict(
        self, keys: FloatArray, positions: IntArray, norms: FloatArray, rotation: Rotation, layer: int, head: int
    ) -> FloatArray:
        """The importance of a KV head's rows, float32 [n], above 0, on one scale for all heads of the model.

        keys: as the engine with this rotation stores them, [n, its head]. positions: RoPE's. norms: of values, [n].
        """
        core = self.network.attention[layer]
        assert core is not None
        plain = rotation.rotate_cached(keys, -positions, layer)
        key, weights = core.row.key, self.ordered(rotation, layer)[head]
        found = features(plain[:, :key], norms) @ weights[:-1] + weights[-1]
        return np.asarray(np.exp(np.minimum(found, np.float32(LARGEST))), np.float32)


def features(keys: FloatArray, norms: FloatArray) -> FloatArray:
    """Append to keys before RoPE, [..., n, head], the logarithms of their norms and of their values' `norms`, [..., n].
    Returns [..., n, head + 2]."""
    both = np.stack([np.linalg.norm(keys, axis=-1), norms], axis=-1)
    return np.concatenate([keys, np.log(both + np.float32(NORM_FLOOR))], axis=-1)


def ranked_cores(network: Network) -> Iterator[tuple[int, Attention]]:
    """Attention layers without a window: the rows that policies evict."""
    for layer, core in enumerate(network.attention):
        if core is not None and core.rows_of is None and not core.window:
            yield layer, core


def importance_bytes(network: Network) -> int:
    """Bytes of the model's linear models."""
    return 4 * sum(map(prod, _shapes(network).values()))


def ranking_bytes(spec: ModelSpec, needs: Needs) -> int:
    """Bytes of the linear models that a policy's session loads; 0 if the policy does not rank by them."""
    return importance_bytes(find_network(spec)) if needs.ranks else 0


def _shapes(network: Network) -> dict[int, tuple[int, ...]]:
    return {layer: (core.row.heads, core.row.key + EXTRA) for layer, core in ranked_cores(network)}


def _order_of(core: Attention, rotation: Rotation, halves: bool) -> AnyArray:
    """For each value of a head in the engine's order, its index in the file's. Only the pairs of RoPE may be arranged
    differently; other values keep their order."""
    head, pairs = core.row.key, core.rope.dim // 2

    def ends(width: int, *, halves: bool) -> AnyArray:
        one = np.arange(pairs)
        return core.rope.first + np.concatenate([one, one + width] if halves else [2 * one, 2 * one + 1])

    here, there = ends(rotation.pairs, halves=rotation.halves), ends(pairs, halves=halves)
    order, every = np.zeros(head, np.intp), np.arange(head)
    order[here] = there
    order[np.setdiff1d(every, here)] = np.setdiff1d(every, there)
    return order
