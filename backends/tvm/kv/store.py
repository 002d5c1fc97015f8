"""The native engine's memory of KV rows: every head's rows lie in a region of one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from edge.backends.head_kv import HeadKV
from edge.backends.row_lists import RowLists
from edge.backends.tvm.kv.householder import find_normals, sample_runs
from edge.backends.tvm.kv.regions import Move, Regions
from edge.backends.tvm.kv.row_formats import row_bytes
from edge.backends.tvm.kv.rows import Rows, with_spare
from edge.backends.tvm.memory import aligned_zeros, release
from edge.backends.tvm.packing.layout import Shape
from edge.types import AnyArray, FloatArray, IntArray


class Arena:
    """What compiled code reads and writes: `rows.arrays`, and of all heads of all layers, int32 [layers · KV heads],
    the first row and the number of rows, which `NativeStore.prepare` fills in.

    move_rows: copies rows within these arrays, by pairs (source, target), int32 [n, 2], of rows of the arena.
    positions, paid: for each row of the arena, its position (for sliding windows) and the attention paid to it (for
    policies); empty unless needed.
    """

    def __init__(
        self, shape: Shape, dtype: str, rows: int, move_rows: Callable[[Iterable[AnyArray], AnyArray], object],
        normals: FloatArray, *, observes: bool,
    ) -> None:  # fmt: skip
        self.shape, self.rows = shape, Rows(rows, shape.padded_head, dtype, normals)
        self.starts: IntArray = aligned_zeros(shape.layers * shape.kv_heads, "int32")
        self.lengths: IntArray = aligned_zeros(shape.layers * shape.kv_heads, "int32")
        self.positions = with_spare(rows if shape.windowed else 0, "int32")
        self.paid = with_spare(rows if observes else 0, "float32")
        self.move_rows = move_rows


class NativeStore:
    """RowStore protocol over some regions of an arena.

    heads: of all layers', those that have these regions. windowed: their layers look at positions. observes: there is
    room for their attention.
    """

    level = False

    def __init__(
        self, arena: Arena, layers: Sequence[int], regions: Regions, *, windowed: bool, observes: bool
    ) -> None:
        shape, self.arena, self.rows, self.regions = arena.shape, arena, arena.rows, regions
        self.heads = (np.array(layers)[:, None] * shape.kv_heads + np.arange(shape.kv_heads)).reshape(-1)
        self.dtype, self.capacity = arena.rows.dtype, regions.capacity
        self.head, self.observes = shape.padded_head, observes
        self.row_bytes = row_bytes(shape, self.dtype) * len(layers)
        self.lengths: IntArray = np.zeros(self.heads.size, np.int32)
        self._windowed = windowed
        self._each = row_bytes(shape, self.dtype) // shape.kv_heads + 4 * windowed + 4 * observes  # bytes

    @property
    def nbytes(self) -> int:
        return self.regions.size * self._each

    @property
    def longest(self) -> int:
        return self.regions.longest

    @property
    def limits(self) -> IntArray:
        return self.regions.limits

    def prepare(self, count: int, position: int) -> None:
        arena = self.arena
        arena.starts[self.heads], arena.lengths[self.heads] = self.regions.starts, self.lengths
        if not self._windowed and not self.observes:
            return
        rows = (self.regions.starts + self.lengths)[:, None] + np.arange(count)
        if self._windowed:
            arena.positions[rows] = position + np.arange(count)
        if self.observes:
            arena.paid[rows] = 0

    def move(self, moves: Sequence[AnyArray]) -> None:
        starts = self.regions.starts.reshape(len(moves), -1, 1, 1)
        in_arena = [(first + pairs).reshape(-1, 2) for first, pairs in zip(starts, moves, strict=True)]
        pairs = np.ascontiguousarray(np.concatenate(in_arena), np.int32)
        if pairs.size:
            self.arena.move_rows(self.rows.arrays.values(), pairs)
            if self.observes:
                self.arena.paid[pairs[:, 1]] = self.arena.paid[pairs[:, 0]]

    def share_out(self) -> None:
        if self.regions.uneven:
            self._follow(self.regions.share_out(self.lengths))

    def place(self, lists: RowLists) -> None:
        if self._windowed:
            for head, length in enumerate(self.lengths.tolist()):
                each = head % len(lists)
                rows = self.regions.starts[head] + lists.physical[each, :length]
                self.arena.positions[rows] = lists.positions(length)[each]

    def clear(self) -> None:
        self.regions.make_even()

    def shrink(self, capacity: int) -> None:
        """Of the regions at the end of the arena."""
        self._follow(self.regions.shrink(capacity, self.lengths))
        self.capacity, end = capacity, self.regions.first + self.regions.size
        self.rows.release(end)
        for array in (self.arena.positions, self.arena.paid):
            if array.size:
                release(array[end:])

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        return self.rows.keys(self._in_arena(rows, head), self.heads if head is None else self.heads[head])

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None:
        self.rows.set_keys(self._in_arena(rows, head), keys, self.heads if head is None else self.heads[head])

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        in_arena = self._in_arena(rows)
        return (self.rows.save(name, in_arena) for name in self.rows.arrays)

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        rows, at = self._in_arena(np.arange(first, first + count)), 0
        for name, array in self.rows.arrays.items():
            part = np.frombuffer(saved, array.dtype, rows.size * self.rows.width(name), at)
            self.rows.restore(name, rows, part)
            at += part.nbytes
        if self.observes:
            self.arena.paid[rows] = 0

    def attention(self, rows: AnyArray) -> FloatArray:
        return np.asarray(self.arena.paid[self.regions.rows(rows)])

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None:
        self.arena.paid[self._in_arena(rows, head)] *= by

    def clear_attention(self) -> None:
        self.arena.paid[:] = 0

    def _in_arena(self, rows: AnyArray, head: int | None = None) -> AnyArray:
        """Physical rows [n] of one head, or of all [heads, n], counted from the start of the arena."""
        return self.regions.rows(rows) if head is None else np.asarray(self.regions.starts[head] + rows)

    def _follow(self, moves: list[Move]) -> None:
        """Move rows to the new starts of their regions."""
        for move in moves:
            self.rows.shift(move)
            if self.observes:
                source, target = (slice(at, at + move.count) for at in (move.source, move.target))
                self.arena.paid[target] = self.arena.paid[source]


def choose_normals(kv: HeadKV[NativeStore], run: Callable[[IntArray], object], vocab: int) -> None:
    """Set the normals of Householder reflections from the keys of random tokens that `run` runs. Empties the cache."""
    runs = sample_runs(kv.capacity, vocab)
    rows = kv.store.rows

    def keys_of(tokens: IntArray) -> FloatArray:
        kv.truncate(0)
        run(tokens)
        keys = np.empty((len(rows.normals), tokens.size, kv.store.head), np.float32)
        for store in kv.stores:
            keys[store.heads] = store.keys(np.arange(tokens.size))
        return keys

    rows.normals[:] = find_normals(map(keys_of, runs), kv.rope.rotation)
    kv.truncate(0)
    kv.settings += f":{runs.shape[1]}"  # rows cannot be read without their normals
