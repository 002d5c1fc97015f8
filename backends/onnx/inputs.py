"""Inputs of a pass besides tokens and rows: RoPE angles, and masks of sliding windows.

ONNX Runtime's own windows count rows, but ours lie in any order, with gaps. So a pass adds a mask of 0 and −inf to
each token's scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.backends.head_kv import HeadKV
from edge.backends.onnx.graph.context import heads_of_ropes
from edge.backends.onnx.kv import OnnxStore
from edge.model.parts.places import Places
from edge.model.structure.layers import Network
from edge.model.structure.spec import ModelSpec
from edge.types import AnyArray, FloatArray, IntArray

ANGLES_AHEAD = 64  # decode steps whose angles are computed at once
_HIDDEN = np.float32(-np.inf)


class Windows:
    """Masks of sliding windows. sizes: [layers], positions that a token sees; 0: all."""

    def __init__(self, sizes: Sequence[int], heads: int, kv_heads: int) -> None:
        self._sizes, self._kv_heads, self._group = sizes, kv_heads, heads // kv_heads
        self.layers = [layer for layer, size in enumerate(sizes) if size]

    def added(self, positions: AnyArray, count: int, dtype: str = "float32") -> dict[int, FloatArray]:
        """The masks of the last `count` of these rows, by layer: [1, heads or 1, count, rows].

        Layers that see the same rows share an array. positions: by physical row, from `HeadKV.rope_positions`.
        """
        if not self.layers:
            return {}

        def hide(positions: AnyArray, size: int) -> FloatArray:
            hidden = positions[None, :, None, :] <= positions[None, :, -count:, None] - size
            return np.asarray(np.where(hidden, _HIDDEN, np.float32(0)), dtype)

        if len(positions) == 1:
            by_size = {size: hide(positions, size) for size in {self._sizes[layer] for layer in self.layers}}
            return {layer: by_size[self._sizes[layer]] for layer in self.layers}
        by_layer = positions.reshape(-1, self._kv_heads, positions.shape[-1])
        return {layer: np.repeat(hide(by_layer[layer], self._sizes[layer]), self._group, 1) for layer in self.layers}


class AngleTables:
    """Cosines and sines of the next positions, computed for many steps at once.

    tables: for each kind of RoPE, [2, rows, head / 2]. rows: at least ANGLES_AHEAD and the longest pass.
    """

    def __init__(self, kv: HeadKV[OnnxStore], network: Network, rows: int, dtype: str) -> None:
        self.tables = [np.zeros((2, rows, head // 2), dtype) for head in heads_of_ropes(network)]
        self._kv, self._rotation = kv, kv.rope.rotation  # that the tables were made by
        self._from = self._known = 0

    def row(self, count: int) -> int:
        """The row of the tables where the next `count` positions begin."""
        first = self._kv.next_rope_position
        if self._rotation is not self._kv.rope.rotation:
            self._rotation, self._known = self._kv.rope.rotation, 0
        if not self._from <= first <= first + count <= self._from + self._known:
            self._from, self._known = first, max(count, ANGLES_AHEAD)
            positions = np.arange(first, first + self._known)
            for kind, table in enumerate(self.tables):
                for out, found in zip(table, self._rotation.tables(kind, positions), strict=True):
                    out[: positions.size] = found[:, : out.shape[1]]
        return first - self._from

    def place(self, count: int, places: Places | None) -> int:
        """As `row`, for tokens at these places."""
        if places is None or places.consecutive:
            return self.row(count)
        self._rotation, self._known = self._kv.rope.rotation, 0
        positions = places.positions + (self._kv.next_rope_position - self._kv.next_position)
        for kind, table in enumerate(self.tables):
            for out, found in zip(table, self._rotation.tables(kind, positions), strict=True):
                out[:count] = found[:, : out.shape[1]]
        return 0


def known(tokens: IntArray, spec: ModelSpec) -> IntArray:
    """The tokens, with the first one of the vocabulary in place of those that have rows."""
    return np.where(tokens < spec.vocab, tokens, 0)
