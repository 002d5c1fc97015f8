"""Sliding windows: masks of the rows that a token does not see, by their positions.

ONNX Runtime's own windows count rows, but ours lie in any order, with gaps. So a pass adds a mask of 0 and −inf to
each token's scores.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.types import AnyArray, FloatArray

_HIDDEN = np.float32(-np.inf)


class Windows:
    """sizes: [layers], positions that a token sees; 0: all."""

    def __init__(self, sizes: Sequence[int], heads: int, kv_heads: int) -> None:
        self._sizes, self._kv_heads, self._group = sizes, kv_heads, heads // kv_heads
        self.layers = [layer for layer, size in enumerate(sizes) if size]

    def added(self, positions: AnyArray, count: int, dtype: str = "float32") -> dict[int, FloatArray]:
        """The masks of the last `count` of these rows, by layer: [1, heads or 1, count, rows].

        Layers that see the same rows share an array.

        positions: by physical row, from `HeadKV.rope_positions`.
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
