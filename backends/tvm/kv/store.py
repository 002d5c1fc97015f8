"""The native engine's store of KV rows: every head's rows lie in a region of one arena."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.checks import check_free
from edge.backends.fixed_state import FixedState
from edge.backends.head_kv import HeadKV
from edge.backends.ring import LayerKinds, Ring
from edge.backends.rope import CacheRope
from edge.backends.row_lists import RowLists
from edge.backends.tvm.kv.householder import find_normals, sample_runs
from edge.backends.tvm.kv.pages import bounds_bytes, pages_bounded
from edge.backends.tvm.kv.regions import TILE, Move, Regions
from edge.backends.tvm.memory import release
from edge.backends.tvm.packing.cores import LANES
from edge.backends.tvm.packing.shape import Shape
from edge.model.cores import RowShape
from edge.types import AnyArray, FloatArray, IntArray


class ArenaRows(Protocol):
    """The keys and values of an arena, `count` rows in the memory of a CPU or a GPU. Row numbers count from its start.

    Arrays of row numbers are int [n] for one head among those of all layers, or [heads, n].
    """

    dtype: str
    count: int
    row_bytes: int  # of a key and a value
    normals: FloatArray  # of the reflections of keys, [heads of all layers, head] (householder.py)

    def move(self, pairs: IntArray) -> None:
        """Copy rows by pairs (source, target), int32 [n, 2]."""
        ...

    def shift(self, move: Move) -> None:
        """Move consecutive rows; source and target begin a tile."""
        ...

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        """Yield the bytes of rows [heads, n]."""
        ...

    def restore(self, rows: AnyArray, saved: memoryview) -> None:
        """The inverse of `save`."""
        ...

    def keys(self, rows: AnyArray, heads: AnyArray | int) -> FloatArray:
        """Keys, float32 [n, head] or [heads, n, head]; heads: numbers among those of all layers."""
        ...

    def set_keys(self, rows: AnyArray, keys: FloatArray, heads: AnyArray | int) -> None: ...

    def set_values(self, rows: AnyArray, values: FloatArray) -> None: ...

    def value_norms(self, rows: AnyArray) -> FloatArray:
        """Norms of values that have memory of their own, float32 [n]."""
        ...

    def collect(self, paid: FloatArray) -> None:
        """Add to `paid`, float32 [count], the attention that kernels have accumulated elsewhere since the last call.

        Rows that a pass appends start with none in both places.
        """
        ...

    def release(self, first: int, last: int) -> None:
        """Free the memory of rows, which are whole tiles. Their content is lost."""
        ...


OwnRows = TypeVar("OwnRows", bound=ArenaRows)


class Arena(Generic[OwnRows]):
    """Memory shared with compiled code: `rows`, and `starts` and `lengths`, the first row and the number of rows of
    each head, int32 [together · layers · KV heads]. `NativeStore.prepare` fills these in for the sequences of a pass.

    row: of the layers whose rows are here, padded. positions, paid: each arena row's position (for sliding windows) and
    received attention (for policies); bounds: of each page, uint16 that hold float16 (pages.py). Empty unless needed.
    """

    def __init__(self, shape: Shape, rows: OwnRows, arrays: Mapping[str, AnyArray], prefix: str = "") -> None:
        """arrays: `KVMemory.bookkeeping`, allocated. prefix: RING for an arena of rings alone."""
        core = shape.ringed if prefix else shape.attention
        self.shape, self.rows, self.row = shape, rows, core.row.padded(LANES)
        self.heads = shape.layers * shape.kv_heads
        none: AnyArray = np.zeros(0, np.uint16)
        self.starts: IntArray = arrays["starts"]
        self.lengths: IntArray = arrays["lengths"]
        self.positions = arrays[f"{prefix}positions"]
        self.paid = none if prefix else arrays["attention"]
        self.bounds = none if prefix else arrays.get("bounds", none)
        self.page_bytes = bounds_bytes(self.row.key) * TILE if self.bounds.size else 0

    def follow(self, count: int) -> None:
        """Fill in starts and lengths for `count` tokens of one sequence, each run as if alone: each sees one row more
        than the token before."""
        starts, lengths = (each.reshape(-1, self.heads) for each in (self.starts, self.lengths))
        starts[1:count] = starts[0]
        lengths[1:count] = lengths[0] + np.arange(1, count)[:, None]


class NativeStore(Generic[OwnRows]):
    """The RowStore protocol over some regions of an arena.

    heads: numbers of the heads with these regions, among those of all layers. windowed: their layers use positions.
    observes: there is room for their attention. place_in_pass: the sequence's place, if several run. bounded: the
    number of each head's first pages that have bounds. pages: whether pages may have bounds.
    """

    level = False

    def __init__(
        self, arena: Arena[OwnRows], layers: Sequence[int], regions: Regions, *, windowed: bool, observes: bool,
        pages: bool = False,
    ) -> None:  # fmt: skip
        self.row, self.arena, self.rows, self.regions = arena.row, arena, arena.rows, regions
        self.heads = heads_of(arena.shape, self.row, layers)
        self.layers, self.dtype, self.capacity = layers, arena.rows.dtype, regions.capacity
        self.observes, self.place_in_pass = observes, 0
        self.row_bytes = self.rows.row_bytes * self.row.heads * len(layers)
        self.lengths: IntArray = np.zeros(self.heads.size, np.int32)
        self._windowed, self.bounded = windowed, 0
        self._each = self.rows.row_bytes + 4 * windowed + 4 * observes  # bytes
        self._each += arena.page_bytes // TILE * pages  # bounds of rings are never touched

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
        heads = self.heads + self.place_in_pass * arena.heads
        arena.starts[heads], arena.lengths[heads] = self.regions.starts, self.lengths
        self._forget_bounds(int(self.lengths.min()))
        if not self._windowed and not self.observes:
            return
        rows = (self.regions.starts + self.lengths)[:, None] + np.arange(count)
        if self._windowed:
            arena.positions[rows] = position + np.arange(count)
        if self.observes:
            arena.paid[rows] = 0

    def stepped(self, reads: int) -> None:
        """Record a step of one token that read at most `reads` rows."""
        self.bounded = max(self.bounded, pages_bounded(int(self.lengths.max()), reads))

    def _forget_bounds(self, first: int = 0) -> None:
        """Invalidate the bounds of pages from row `first` on, because their rows change."""
        self.bounded = min(self.bounded, first // TILE)

    def move(self, moves: Sequence[AnyArray]) -> None:
        starts = self.regions.starts.reshape(len(moves), -1, 1, 1)
        in_arena = [(first + pairs).reshape(-1, 2) for first, pairs in zip(starts, moves, strict=True)]
        pairs = np.ascontiguousarray(np.concatenate(in_arena), np.int32)
        if pairs.size:
            self._forget_bounds()
            paid = self._paid()
            self.rows.move(pairs)
            if self.observes:
                paid[pairs[:, 1]] = paid[pairs[:, 0]]

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
        """Reduce the capacity, and free the rows at the end of the regions."""
        before = self.regions.first + self.regions.size
        self._forget_bounds()
        self._follow(self.regions.shrink(capacity, self.lengths))
        self.capacity, end = capacity, self.regions.first + self.regions.size
        self.rows.release(end, before)
        for array in (self.arena.positions, self.arena.paid):
            if array.size:
                release(array[end:before])
        if each := self.arena.page_bytes // 2:
            release(self.arena.bounds[end // TILE * each : before // TILE * each])

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        return self.rows.keys(self._in_arena(rows, head), self.heads if head is None else self.heads[head])

    def value_norms(self, rows: AnyArray, head: int) -> FloatArray:
        return self.rows.value_norms(self._in_arena(rows, head))

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None:
        self._forget_bounds()
        self.rows.set_keys(self._in_arena(rows, head), keys, self.heads if head is None else self.heads[head])

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        return self.rows.save(self._in_arena(rows))

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        rows = self._in_arena(np.arange(first, first + count))
        self._forget_bounds(first)
        self.rows.restore(rows, saved)
        if self.observes:
            self._paid()[rows] = 0

    def attention(self, rows: AnyArray) -> FloatArray:
        return np.asarray(self._paid()[self.regions.rows(rows)])

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None:
        self._paid()[self._in_arena(rows, head)] *= by

    def clear_attention(self) -> None:
        self._paid()[self.regions.first : self.regions.first + self.regions.size] = 0

    def _in_arena(self, rows: AnyArray, head: int | None = None) -> AnyArray:
        """Arena rows [n] for physical rows of one head, or [heads, n] for all."""
        return self.regions.rows(rows) if head is None else np.asarray(self.regions.starts[head] + rows)

    def _follow(self, moves: list[Move]) -> None:
        """Move rows to the new starts of their regions."""
        paid = self._paid()
        for move in moves:
            self.rows.shift(move)
            if self.observes:
                source, target = (slice(at, at + move.count) for at in (move.source, move.target))
                paid[target] = paid[source]

    def _paid(self) -> FloatArray:
        """All attention so far, of every row of the arena."""
        if self.observes:
            self.rows.collect(self.arena.paid)
        return self.arena.paid


def heads_of(shape: Shape, row: RowShape, layers: Sequence[int]) -> AnyArray:
    """The numbers of these layers' heads among those of all layers. row: of the layers."""
    return (np.array(layers, int)[:, None] * shape.kv_heads + np.arange(row.heads)).reshape(-1)


def make_kv(
    arena: Arena[OwnRows], kinds: LayerKinds, regions: Regions, rings: Regions, rope: CacheRope, key: str,
    config: EngineConfig, state: FixedState | None = None, apart: Arena[OwnRows] | None = None,
) -> HeadKV[NativeStore[OwnRows]]:  # fmt: skip
    """Create the cache over an arena with these regions (`regions.make_regions`). state: of layers without rows. apart:
    the arena of rings, if they have their own."""
    ring, windowed = None, arena.shape.windowed and not kinds.ringed
    if kinds.ringed:
        ringed = NativeStore(apart or arena, kinds.ringed, rings, windowed=True, observes=False)
        ring = Ring(ringed, kinds.ringed, kinds.window)
    store = NativeStore(
        arena, kinds.whole, regions, windowed=windowed, observes=config.observes, pages=config.reads > 0
    )
    return HeadKV(store, kinds.whole, rope, key, config.pinned, ring, state)


def append_rows(kv: HeadKV[NativeStore[OwnRows]], rows: FloatArray, prepare: Callable[[int], None]) -> None:
    """See GivenEngine. prepare: makes room for rows of the next pass."""
    store, count, size = kv.store, rows.shape[3], kv.store.row.key
    check_free(count, kv.free)
    kv.announce(count)
    prepare(count)
    padded = np.pad(rows, [(0, 0)] * 4 + [(0, size - rows.shape[4])])
    keys = np.stack([kv.rope.ordered(each, layer) for layer, each in enumerate(padded[0])])
    places = store.regions.rows(kv.length + np.arange(count))
    store.rows.set_keys(places, keys.reshape(-1, count, size), store.heads)
    store.rows.set_values(places, padded[1].reshape(-1, count, size))
    kv.appended(count)


def choose_normals(kv: HeadKV[NativeStore[OwnRows]], run: Callable[[IntArray], object], vocab: int) -> None:
    """Set the Householder normals from the keys of random tokens, run by `run`. Empties the cache."""
    runs = sample_runs(kv.capacity, vocab)
    keys: list[list[FloatArray]] = [[] for _ in kv.stores]
    for tokens in runs:
        kv.truncate(0)
        run(tokens)
        for found, store in zip(keys, kv.stores, strict=True):
            found.append(store.keys(np.arange(tokens.size)))
    for found, store in zip(keys, kv.stores, strict=True):
        store.rows.normals[store.heads] = find_normals(found, kv.rope.rotation.of(store.layers))
    kv.truncate(0)
    kv.settings += f":{runs.shape[1]}"  # rows cannot be read without their normals
