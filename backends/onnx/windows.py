"""Sliding windows: which rows a token does not see, by their positions.

ONNX Runtime's own windows count rows, but ours lie in any order, with gaps. So a pass says what each token sees, by
what is added to its scores: 0, or −inf.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.backends.onnx.kv import OnnxKV
from edge.types import FloatArray

_HIDDEN = np.float32(-np.inf)


class Windows:
    """sizes: [layers], positions that a token sees; 0: all."""

    def __init__(self, sizes: Sequence[int], heads: int, kv_heads: int) -> None:
        self._sizes, self._kv_heads, self._group = sizes, kv_heads, heads // kv_heads
        self.layers = [layer for layer, size in enumerate(sizes) if size]

    def added(self, kv: OnnxKV, count: int) -> dict[int, FloatArray]:
        """What is added to scores of the next `count` tokens, by layer: [1, heads or 1, count, rows], of the rows'
        float type. Layers that see the same share an array."""
        if not self.layers:
            return {}
        turned, now = kv.turned_by_slot(count), kv.next_turn + np.arange(count)
        dtype = np.float16 if kv.dtype == "f16" else np.float32

        def hide(turned: FloatArray, size: int) -> FloatArray:
            hidden = turned[None, :, None, :] <= (now - size)[:, None]
            return np.ascontiguousarray(np.repeat(np.where(hidden, _HIDDEN, 0).astype(dtype), self._group, axis=1))

        if kv.alike:
            by_size = {size: hide(turned, size)[:, :1] for size in {self._sizes[layer] for layer in self.layers}}
            return {layer: by_size[self._sizes[layer]] for layer in self.layers}
        by_layer = turned.reshape(-1, self._kv_heads, turned.shape[-1])
        return {layer: hide(by_layer[layer], self._sizes[layer]) for layer in self.layers}
