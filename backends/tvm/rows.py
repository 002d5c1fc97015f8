"""The rows of the KV cache as they lie in memory, those of all heads together, for NumPy: kernels/cache.py says how."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.codes import FORMATS, decode, encode, pack_keys, unpack_keys
from edge.backends.tvm.layout import Shape
from edge.backends.tvm.memory import aligned_zeros
from edge.backends.tvm.regions import TILE, Move
from edge.types import AnyArray, FloatArray

_SPARE_ROWS = 64  # behind the last head: scores are computed for up to 4 tiles of 16 rows at once


def row_bytes(shape: Shape, dtype: str) -> int:
    """Bytes that a token adds, in all layers."""
    form = FORMATS[dtype]
    codes = shape.padded_head // form.packed * np.dtype(form.memory).itemsize
    return 2 * shape.layers * shape.kv_heads * (codes + form.scales * np.dtype(form.scale).itemsize)


class Rows:
    """`arrays` are what compiled code works on. Rows are named by their numbers from the start of the arena."""

    def __init__(self, count: int, head: int, dtype: str) -> None:
        form, self.dtype, self._tiles = FORMATS[dtype], dtype, count // TILE
        self._widths = form.widths(head)
        types = [form.memory] * 2 + [form.scale] * 2
        self.arrays = {
            name: with_spare(count * width, memory, width)
            for (name, width), memory in zip(self._widths.items(), types, strict=True)
        }
        self.nbytes = sum(array.nbytes for array in self.arrays.values())

    def width(self, name: str) -> int:
        """Elements that an array has for every row."""
        return self._widths[name]

    def gather(self, name: str, rows: AnyArray) -> AnyArray:
        """As stored, [..., width]."""
        view = self._view(name)
        return np.asarray(view[rows] if name == "values" else view[rows // TILE, :, rows % TILE])

    def scatter(self, name: str, rows: AnyArray, stored: AnyArray) -> None:
        if name == "values":
            self._view(name)[rows] = stored
        else:
            self._view(name)[rows // TILE, :, rows % TILE] = stored

    def keys(self, rows: AnyArray) -> FloatArray:
        """float32 [..., head]."""
        codes = self.gather("keys", rows)
        return decode(self.dtype, unpack_keys(self.dtype, codes), self.gather("key_scales", rows))

    def set_keys(self, rows: AnyArray, keys: FloatArray) -> None:
        codes, scales = encode(self.dtype, keys)
        self.scatter("keys", rows, pack_keys(self.dtype, codes))
        self.scatter("key_scales", rows, scales)

    def shift(self, move: Move) -> None:
        """Move neighbouring rows; both ends begin with a tile."""
        for name in self.arrays:
            view, unit = self._view(name), 1 if name == "values" else TILE
            count = -(-move.count // unit)
            source, target = move.source // unit, move.target // unit
            view[target : target + count] = view[source : source + count]

    def _view(self, name: str) -> AnyArray:
        """values [rows, width], the others [rows / 16, width, 16]."""
        array, width = self.arrays[name], self.width(name)
        return array.reshape(-1, width) if name == "values" else array.reshape(self._tiles, width, TILE)


def with_spare(count: int, dtype: str, width: int = 1) -> AnyArray:
    """[count] zeros, with room behind them that kernels may read."""
    return aligned_zeros(count + _SPARE_ROWS * width, dtype)[:count]
