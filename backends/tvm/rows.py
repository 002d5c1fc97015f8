"""The rows of the KV cache as they lie in memory, those of all heads together, for NumPy: kernels/cache.py says how."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.layout import Shape
from edge.backends.tvm.memory import aligned_zeros
from edge.backends.tvm.regions import TILE, Move
from edge.types import AnyArray, FloatArray

NUMPY_TYPE = {"f32": "float32", "f16": "float16", "int8": "int8"}
_SPARE_ROWS = 64  # behind the last head: scores are computed for up to 4 tiles of 16 rows at once


def row_bytes(shape: Shape, dtype: str) -> int:
    """Bytes that a token adds, in all layers."""
    heads = shape.layers * shape.kv_heads
    scales = 8 if dtype == "int8" else 0
    return heads * (2 * shape.padded_head * np.dtype(NUMPY_TYPE[dtype]).itemsize + scales)


class Rows:
    """`arrays` are what compiled code works on. Rows are named by their numbers from the start of the arena."""

    def __init__(self, count: int, head: int, dtype: str) -> None:
        self.dtype, self._head = dtype, head
        scales = count if dtype == "int8" else 0
        self.arrays = {
            "keys": with_spare(count * head, NUMPY_TYPE[dtype], head),
            "values": with_spare(count * head, NUMPY_TYPE[dtype], head),
            "key_scales": with_spare(scales, "float32"),
            "value_scales": with_spare(scales, "float32"),
        }
        self.nbytes = sum(array.nbytes for array in self.arrays.values())

    def width(self, name: str) -> int:
        """Numbers that an array has for every row."""
        return self._head if name in ("keys", "values") else int(self.dtype == "int8")

    def gather(self, name: str, rows: AnyArray) -> AnyArray:
        """As stored, [..., width]."""
        if self.width(name) == 0:
            return np.zeros((*rows.shape, 0), np.float32)
        if name == "keys":
            return np.asarray(self._view(name)[rows // TILE, :, rows % TILE])
        return np.asarray(self._view(name)[rows])

    def scatter(self, name: str, rows: AnyArray, stored: AnyArray) -> None:
        if self.width(name) == 0:
            return
        if name == "keys":
            self._view(name)[rows // TILE, :, rows % TILE] = stored
        else:
            self._view(name)[rows] = stored

    def keys(self, rows: AnyArray) -> FloatArray:
        """float32 [..., head]."""
        keys: FloatArray = self.gather("keys", rows).astype(np.float32)
        return keys * self.gather("key_scales", rows) if self.dtype == "int8" else keys

    def set_keys(self, rows: AnyArray, keys: FloatArray) -> None:
        if self.dtype == "int8":
            scales = np.abs(keys).max(axis=-1, keepdims=True) / np.float32(127)
            self.scatter("key_scales", rows, scales)
            keys = np.rint(keys / np.where(scales > 0, scales, 1))
        self.scatter("keys", rows, keys.astype(NUMPY_TYPE[self.dtype]))

    def shift(self, move: Move) -> None:
        """Move neighbouring rows; both ends begin with a tile."""
        for name in self.arrays:
            if self.width(name) == 0:
                continue
            view, unit = self._view(name), TILE if name == "keys" else 1
            count = -(-move.count // unit)
            source, target = move.source // unit, move.target // unit
            view[target : target + count] = view[source : source + count]

    def _view(self, name: str) -> AnyArray:
        array = self.arrays[name]
        return array.reshape(-1, self._head, TILE) if name == "keys" else array.reshape(-1, self.width(name))


def with_spare(count: int, dtype: str, width: int = 1) -> AnyArray:
    """[count] zeros, with room behind them that kernels may read."""
    return aligned_zeros(count + _SPARE_ROWS * width, dtype)[:count]
