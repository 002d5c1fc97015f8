"""The KV cache of engines that evict in place, head by head: bookkeeping is here, memory is the engine's.

An engine's `RowStore` holds keys, values and attention by physical row, and moves them on request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, Protocol, TypeVar

import numpy as np

from edge.backends.base import KVState, check_capacity, check_range, check_rows, check_state
from edge.backends.rope import CacheRope, Rotation
from edge.backends.row_lists import PinnedKeys, RowLists, rotated_at_once
from edge.errors import EngineError, InputError, UnsupportedError
from edge.types import AnyArray, FloatArray, IntArray

_BASE_BYTES = 8  # a saved state begins with `RowLists.base`: its keys are rotated to position + base


class RowStore(Protocol):
    """Keys, values and attention of all heads of all layers. Rows are physical ones, counted from 0 in each head.

    capacity: rows per head, on average where heads differ. nbytes: allocated. row_bytes: of a saved row, all heads.
    head: values of a key. observes: there is room for attention. level: all heads must keep equally many rows.
    lengths: rows in use, int32 [heads]; the cache writes it, and compiled code may read it.
    """

    capacity: int
    nbytes: int
    row_bytes: int
    head: int
    observes: bool
    level: bool
    lengths: IntArray

    @property
    def longest(self) -> int:
        """Rows that one head may hold."""
        ...

    @property
    def limits(self) -> IntArray:
        """Rows that each head has room for, [heads]."""
        ...

    def prepare(self, count: int, position: int) -> None:
        """`count` rows are about to be written behind those in use; the first has this position."""
        ...

    def move(self, moves: Sequence[AnyArray]) -> None:
        """Copy rows, pairs (from, to) int32 [n, 2]: for each head, or the same for all."""
        ...

    def share_out(self) -> None:
        """Heads now keep different numbers of rows: give all equally many free ones."""
        ...

    def place(self, lists: RowLists) -> None:
        """Note the physical rows and positions in `lists`, for sliding windows."""
        ...

    def clear(self) -> None:
        """No rows are in use."""
        ...

    def shrink(self, capacity: int) -> None:
        """Return the memory of all rows beyond `capacity`."""
        ...

    def keys(self, rows: AnyArray, head: int | None = None) -> FloatArray:
        """A copy: of one head float32 [n, head], or of all [heads, n, head]."""
        ...

    def set_keys(self, rows: AnyArray, keys: FloatArray, head: int | None = None) -> None: ...

    def save(self, rows: AnyArray) -> Iterable[bytes]:
        """The same rows of all heads."""
        ...

    def restore(self, first: int, count: int, saved: memoryview) -> None:
        """Put saved rows behind the `first` ones, without attention."""
        ...

    def attention(self, rows: AnyArray) -> FloatArray:
        """Of rows [heads, n], or [1, n] for all heads the same: float32 [heads, n]."""
        ...

    def scale_attention(self, head: int, rows: AnyArray, by: FloatArray) -> None: ...

    def clear_attention(self) -> None: ...


Store = TypeVar("Store", bound=RowStore)


class HeadKV(Generic[Store]):
    """HeadKVCache protocol over a `RowStore`.

    settings: `key` without what the choice of RoPE's factors adds. settle: called before attention is read or rows
    move, for engines that let queries wait.
    """

    def __init__(self, store: Store, layers: int, kv_heads: int, rope: CacheRope, settings: str, pinned: int) -> None:
        self.store, self.rope, self.settings = store, rope, settings
        self.capacity, self.nbytes, self.lengths = store.capacity, store.nbytes, store.lengths
        self.has_tail, self.earliest = False, 0
        self.closed = False
        self.settle: Callable[[], None] = lambda: None
        self._layers, self._kv_heads, self._heads = layers, kv_heads, layers * kv_heads
        self._lists = RowLists(store.longest)
        self._pinned = PinnedKeys(self._heads, store.head, pinned)

    @property
    def key(self) -> str:
        return self.settings + self.rope.suffix

    @property
    def length(self) -> int:
        return int(self.lengths.max())

    @property
    def free(self) -> int:
        return int((self.store.limits - self.lengths).min())

    @property
    def longest(self) -> int:
        return self.store.longest

    @property
    def alike(self) -> bool:
        """Whether all heads keep the same rows."""
        return len(self._lists) == 1

    @property
    def positions(self) -> IntArray:
        """int32 [length]; once heads keep different rows [layers, KV heads, length], -1 behind a head's last."""
        positions: IntArray = self._lists.positions(self.length).astype(np.int32)
        return positions[0] if self.alike else self._by_head(np.where(self._used(), positions, np.int32(-1)))

    @property
    def next_position(self) -> int:
        return self._lists.next_position

    @property
    def next_rope_position(self) -> int:
        """The RoPE position of the next key."""
        return self._lists.next_rope_position

    def rope_positions(self, count: int = 0) -> AnyArray:
        """By physical row, those of the next `count` rows too: int64 [1, rows], or [heads, rows] once heads differ."""
        return self._lists.by_physical_row(self.length, count)

    @property
    def head_lengths(self) -> IntArray:
        return self._by_head(np.array(self.lengths)[:, None])[..., 0]

    @property
    def ages(self) -> IntArray:
        positions = self.positions
        if positions.ndim == 1:
            positions = self._by_head(positions[None])
        return np.where(positions < 0, 0, self.next_position - positions).astype(np.int32)

    @property
    def attention(self) -> FloatArray:
        if not self.store.observes:
            raise UnsupportedError("this engine was loaded without EngineConfig.observes")
        self.settle()
        used = self._used()
        rows = self._lists.physical[:, : self.length]
        paid = self.store.attention(rows if self.alike else np.where(used, rows, 0))
        return self._by_head(np.where(used, paid, np.float32(0)))

    def clear_attention(self) -> None:
        self.settle()
        self.store.clear_attention()

    def keys(self, layer: int) -> FloatArray:
        keys = np.zeros((self._kv_heads, self.length, self.store.head), np.float32)
        for index, own in enumerate(keys):
            head = layer * self._kv_heads + index
            rows, _ = self._rows_of(head)
            own[: rows.size] = self.store.keys(rows, head)
        return keys

    def expect(self, count: int) -> None:
        self._check_open()
        if not self.rope.is_outgrown_by(self.next_position + count):
            return
        self.settle()
        between = self.rope.lengthen(self.length)
        self._pinned.forget()
        for head in (None,) if self.alike else range(self._heads):
            rows, positions = self._rows_of(head or 0)
            for part in rotated_at_once(rows.size):
                self._rotate(rows[part], positions[part], between, head)

    def prepare(self, count: int) -> None:
        """`count` rows are about to be written behind the last physical rows."""
        self.store.prepare(count, self.next_position)

    def appended(self, count: int) -> None:
        """A pass has written the rows."""
        self._lists.append(self.lengths, count)
        self.lengths += count

    def keep(self, rows: IntArray, *, close_gaps: bool) -> None:
        self._check_open()
        self.settle()
        rows = check_rows(rows, int(self.lengths.min()))
        if close_gaps and not self.alike:
            raise UnsupportedError("gaps cannot be closed once heads keep different rows")
        self._pinned.forget(rows)
        self._retain([rows] * len(self._lists))
        if close_gaps:
            self._move_keys(*self._lists.close_gaps(rows.size))
        self.store.place(self._lists)

    def keep_heads(self, rows: Sequence[IntArray]) -> None:
        self._check_open()
        self.settle()
        if len(rows) != self._heads:
            raise InputError(f"rows for {self._heads} heads are wanted, not for {len(rows)}")
        checked = [check_rows(each, length) for each, length in zip(rows, self.lengths.tolist(), strict=True)]
        if self.store.level and len({each.size for each in checked}) > 1:
            raise UnsupportedError("this engine keeps equally many rows in all heads")
        self._lists.split(self._heads)
        self._pinned.forget()
        self._retain(checked)
        self.store.share_out()
        self.store.place(self._lists)

    def renumber(self) -> None:
        self._check_open()
        self.settle()
        length = self.length
        for head in range(self._heads):
            rows, found = self._rows_of(head)
            wanted = np.arange(rows.size) + length - rows.size  # the newest rows of all heads are level
            if self.store.observes:
                younger = (length - wanted) / (self.next_rope_position - found)
                self.store.scale_attention(head, rows, younger.astype(np.float32))
            moved = np.flatnonzero(wanted != found)
            if moved.size:
                self._rotate(rows[moved], (wanted - found)[moved], self.rope.rotation, head)
        self._lists.renumber(self.lengths[: len(self._lists)])
        self._pinned.forget()
        self.store.place(self._lists)

    def truncate(self, length: int, end: KVState | None = None) -> None:
        self._check_open()
        self.settle()
        dropped = self.length - length
        if not 0 <= length <= self.length or (length and dropped > int(self.lengths.min())):
            raise InputError(f"cannot truncate {self.length} rows to {length}")
        if length == 0:
            self._lists.clear()
            self.lengths[:] = 0
            self.store.clear()
            self._pinned.forget()
            self.rope.clear()
        elif dropped:
            lengths = self.lengths[: len(self._lists)].tolist()
            self._lists.drop(length, dropped)
            self._pinned.forget(np.arange(length, dtype=np.int32))
            self._retain([np.arange(each - dropped, dtype=np.int32) for each in lengths])
            self.store.place(self._lists)

    def shrink(self, capacity: int) -> None:
        self._check_open()
        check_capacity(capacity, self)
        if capacity >= self.capacity:
            return
        self.settle()
        self.store.shrink(capacity)
        self.capacity, self.nbytes = self.store.capacity, self.store.nbytes
        self.store.place(self._lists)

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        if not self.alike:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        last, positions = check_range(first, last, self.length), self.positions
        next_position = int(positions[last]) if last < self.length else self.next_position
        parts = [np.int64(self._lists.base).tobytes(), *self.store.save(self._lists.physical[0, first:last])]
        return KVState(self.key, positions[first:last].copy(), next_position, b"".join(parts))

    def append(self, state: KVState) -> None:
        self._check_open()
        if not self.length:
            self.rope.adopt(state.key, self.settings)
        check_state(state, self, self.next_position)
        first, count = self.length, state.positions.size
        if len(state.data) != _BASE_BYTES + count * self.store.row_bytes:
            raise InputError("the saved KV rows are damaged")
        base = int(np.frombuffer(state.data, np.int64, 1)[0])
        if not self.alike or (first and base != self._lists.base):
            raise InputError("the saved KV rows do not fit behind rows that were evicted since")
        self.store.restore(first, count, memoryview(state.data)[_BASE_BYTES:])
        self._lists.append_saved(first, state.positions, base, state.next_position)
        self.lengths[:] = first + count
        self.store.place(self._lists)

    def _rows_of(self, head: int) -> tuple[AnyArray, AnyArray]:
        """The physical rows of a head and their RoPE positions, oldest first."""
        each, length = head % len(self._lists), int(self.lengths[head])
        return self._lists.physical[each, :length], self._lists.rope_positions[each, :length]

    def _retain(self, rows: Sequence[IntArray]) -> None:
        """Keep these logical rows of each list."""
        self.store.move(self._lists.retain(rows))
        self.lengths[:] = [kept.size for kept in rows] * (self._heads // len(rows))

    def _move_keys(self, rows: AnyArray, before: AnyArray, after: AnyArray) -> None:
        """Rotate the keys of logical rows from RoPE positions to others."""
        for part in rotated_at_once(rows.size):
            physical = self._lists.physical[0, rows[part]]
            keys, by = self._pinned.exact(rows[part], self.store.keys(physical), before[part], after[part])
            self.store.set_keys(physical, self.rope.rotation.rotate_cached(keys, by))

    def _rotate(self, rows: AnyArray, by: AnyArray, rotation: Rotation, head: int | None) -> None:
        """Rotate the keys of physical rows, of one head or of all."""
        layer = None if head is None else head // self._kv_heads
        self.store.set_keys(rows, rotation.rotate_cached(self.store.keys(rows, head), by, layer), head)

    def _used(self) -> AnyArray:
        """Whether a head has a row, [heads, length]."""
        return np.asarray(np.arange(self.length) < self.lengths[:, None])

    def _by_head(self, values: AnyArray) -> AnyArray:
        """[heads, n], or [1, n] if all heads agree, broadcast to [layers, KV heads, n]."""
        shape = (self._layers, self._kv_heads, values.shape[-1])
        return np.asarray(np.broadcast_to(values[0], shape) if len(values) == 1 else values.reshape(shape))

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")
