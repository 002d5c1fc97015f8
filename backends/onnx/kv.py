"""The ONNX engine's store of KV rows: NumPy arrays that ONNX Runtime reads and writes.

Attention does not depend on the order of rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from edge.backends.onnx.rows import NUMPY_TYPE, load_rows, row_values, store_rows
from edge.backends.row_lists import RowLists
from edge.devices.memory import release_pages
from edge.model.cores import RowShape
from edge.model.structure.layers import Network
from edge.types import AnyArray, FloatArray, IntArray


def row_of(network: Network, layers: Sequence[int]) -> RowShape:
    """The rows of these layers, which have the same shape (`layout.check_network`); of none, rows without values."""
    found = network.rows[layers[0]] if layers else None
    return found or RowShape(int(bool(layers)), 0, 0)


def row_bytes(row: RowShape, dtype: str) -> int:
    """Bytes of a token's row in one layer."""
    return row_values(row.values, dtype) * np.dtype(NUMPY_TYPE[dtype]).itemsize


class OnnxStore:
    """The RowStore protocol over some layers, with the same number of rows in all heads.

    array: keys and values, [2, own layers, KV heads, capacity, stored values], or keys alone, whose memory values share
    (`RowShape.shared`): [1, …]. scales: of int8 and int4 rows, float32 [2 or 1, own layers, KV heads, 1, head]. paid:
    attention by physical row, float32 [own layers, KV heads, capacity or 0]. rows: allocated rows where a static graph
    fixes them, independent of the capacity; None: the capacity.
    """

    level = True

    def __init__(
        self, network: Network, dtype: str, capacity: int, layers: Sequence[int], *, observes: bool,
        rows: int | None = None,
    ) -> None:  # fmt: skip
        self.fixed, self.row = rows is not None, row_of(network, layers)
        self.dtype, self.capacity, self.observes = dtype, capacity, observes
        self.row_bytes = row_bytes(self.row, dtype) * len(layers)
        heads = self.row.heads
        kinds = 2 - self.row.shared
        shape = (kinds, len(layers), heads, rows or capacity, row_values(self.row.key, dtype))
        self.array: AnyArray = np.zeros(shape, NUMPY_TYPE[dtype])
        self.layers, self.scales = list(layers), np.ones((kinds, len(layers), heads, 1, self.row.key), np.float32)
        self.paid = np.zeros((len(layers), heads, capacity if observes else 0), np.float32)
        self.lengths: IntArray = np.zeros(len(layers) * heads, np.int32)
        self.nbytes = self.array.nbytes + self.paid.nbytes

    @property
    def longest(self) -> int:
        return self.capacity

    @property
    def limits(self) -> IntArray:
        return np.full(len(self.lengths), self.capacity, np.int32)

    def prepare(self, count: int, position: int) -> None:
        first = int(self.lengths[0])
        self.paid[:, :, first : first + count] = 0

    def move(self, moves: Sequence[AnyArray]) -> None:
        _, layers, kv_heads, *_ = self.array.shape
        for layer in range(layers):
            own = moves if len(moves) == 1 else moves[layer * kv_heads : (layer + 1) * kv_heads]
            if not (longest := max(map(len, own))):
                continue
            pairs = np.zeros((len(own), longest, 2), np.int32)
            for head, each in enumerate(own):
                if len(each):
                    pairs[head] = each[-1]  # shorter lists repeat their last move
                    pairs[head, : len(each)] = each
            sources, targets = pairs[..., 0], pairs[..., 1]
            heads = np.arange(kv_heads, dtype=np.int32)[:, None]
            for array in (*self.array[:, layer], self.paid[layer]):
                if array.size:
                    array[heads, targets] = array[heads, sources]

    def share_out(self) -> None:
        """Does nothing: all heads have the same number of rows."""

    def place(self, lists: RowLists) -> None:
        """Does nothing: `Windows` reads positions at every pass."""

    def clear(self) -> None:
        """Does nothing: unused rows are not read."""

    def shrink(self, capacity: int) -> None:
        """Reduce the rows per head within the same memory, and return the freed pages to the system."""
        if self.fixed:
            self.paid, self.capacity = self.paid[:, :, :capacity].copy(), capacity
            return
        length, before = int(self.lengths[0]), self.array
        shape, flat = (*before.shape[:3], capacity, before.shape[4]), before.reshape(-1)
        self.array = flat[: math.prod(shape)].reshape(shape)
        for head in np.ndindex(shape[:3]):  # in this order, no row is overwritten before it has moved
            self.array[head][:length] = before[head][:length]
        rest = flat[self.array.size :]
        release_pages(rest.ctypes.data, rest.nbytes)
        self.paid = self.paid[:, :, :capacity].copy()
        self.capacity, self.nbytes = capacity, self.array.nbytes + self.paid.nbytes

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        stored, scales = self._keys(head)
        return load_rows(stored[:, rows] if head is None else stored[rows], scales, self.dtype)

    def value_norms(self, rows: AnyArray, head: int) -> FloatArray:
        stored = self.array[-1].reshape(len(self.lengths), *self.array.shape[3:])[head, rows]
        scales = self.scales[-1].reshape(len(self.lengths), 1, -1)[head]
        values = load_rows(stored, scales, self.dtype)[..., : self.row.value]
        return np.asarray(np.linalg.norm(values, axis=-1), np.float32)

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None:
        stored, scales = self._keys(head)
        stored[rows if head is not None else np.s_[:, rows]] = store_rows(keys, scales, self.dtype)

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        return [self.array[:, :, :, rows].tobytes()]

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        new = slice(first, first + count)
        stored = np.frombuffer(saved, self.array.dtype)
        self.array[:, :, :, new] = stored.reshape(*self.array.shape[:3], count, self.array.shape[-1])
        self.paid[:, :, new] = 0

    def attention(self, rows: AnyArray) -> FloatArray:
        heads = np.arange(len(self.lengths))[:, None]
        return np.asarray(self.paid.reshape(len(heads), -1)[heads, rows])

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None:
        self.paid.reshape(len(self.lengths), -1)[head, rows] *= by

    def clear_attention(self) -> None:
        self.paid[:] = 0

    def close(self) -> None:
        self.array = self.array[:, :, :, :0].copy()

    def _keys(self, head: int | None) -> tuple[AnyArray, FloatArray]:
        """Stored keys, a view, and their scales: of one head [capacity, …], or of all [heads, capacity, …]."""
        stored = self.array[0].reshape(len(self.lengths), *self.array.shape[3:])
        scales = self.scales[0].reshape(len(self.lengths), 1, -1)
        return (stored, scales) if head is None else (stored[head], scales[head])
