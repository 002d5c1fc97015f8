"""The KV cache of engines that evict in place, head by head: bookkeeping here, memory in the engine.

An engine's `RowStore` holds keys, values and attention by physical row, and moves them on request. Layers with a
sliding window have a store and bookkeeping of their own (ring.py): policies neither see nor evict their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic

import numpy as np

from edge.backends.checks import check_capacity, check_range, check_rows, check_state
from edge.backends.fixed_state import FixedState
from edge.backends.importance import RowImportance
from edge.backends.kv_cache import KVState, RewindError, position_behind
from edge.backends.ring import Ring
from edge.backends.rope import CacheRope, Rotation
from edge.backends.row_lists import PinnedKeys, RowLists, rotated_at_once
from edge.backends.row_store import Store
from edge.errors import EngineError, InputError, UnsupportedError
from edge.model.parts.places import Places
from edge.types import AnyArray, FloatArray, IntArray

_BASE_BYTES = 8  # a saved state begins with `RowLists.base`: its keys are rotated to position + base


class HeadKV(Generic[Store]):
    """The HeadKVCache protocol over a `RowStore` of some layers' heads.

    ring: rows of layers with windows. state: of layers without rows. A saved cache's tail holds both, in this order.
    settings: `key` without the suffix for the choice of RoPE's factors. settle: called before attention is read or rows
    move, for engines that batch queries. balances: of layers with latent rows, the exponents of the powers of two by
    which the store has keys behind their values (tvm/kv/balance.py); those that policies read are without them.
    """

    def __init__(
        self, store: Store, layers: Sequence[int], rope: CacheRope, settings: str, pinned: int,
        ring: Ring[Store] | None = None, state: FixedState | None = None,
    ) -> None:  # fmt: skip
        self.store, self.ring, self.state, self.rope, self.settings = store, ring, state, rope, settings
        self.capacity, self.lengths, self.has_tail = store.capacity, store.lengths, bool(ring or state)
        self.closed = False
        self.settle: Callable[[], None] = lambda: None
        self.balances: Sequence[int] = ()
        self.layers, self._kv_heads, self._heads = layers, store.row.heads, len(layers) * store.row.heads
        self._lists = RowLists(store.longest)
        self._pinned = PinnedKeys(self._heads, store.row.key, pinned)

    @property
    def key(self) -> str:
        return self.settings + self.rope.suffix

    @property
    def nbytes(self) -> int:
        return self.store.nbytes + self.fixed

    @property
    def stores(self) -> list[Store]:
        return [self.store, *([self.ring.store] if self.ring else [])]

    @property
    def fixed(self) -> int:
        return (self.ring.store.nbytes if self.ring else 0) + (self.state.nbytes if self.state else 0)

    @property
    def length(self) -> int:
        return int(self.lengths.max())

    @property
    def earliest(self) -> int:
        if self.state:
            return self.length + (not self.state.whole)
        if self.ring is None:
            return 0
        length, reach = self.length, self.ring.reach
        if not self.ring.whole:
            return length + 1
        if not self.alike:
            return max(0, length - (self._lists.next_rope_position - reach))
        return min(length, int(np.searchsorted(self._lists.rope_positions[0, :length], reach - 1)) + 1)

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
        """int32 [length]; once heads keep different rows [layers, KV heads, length], -1 after a head's last."""
        positions: IntArray = self._lists.positions(self.length).astype(np.int32)
        return positions[0] if self.alike else self._by_head(np.where(self._used(), positions, np.int32(-1)))

    @property
    def next_position(self) -> int:
        return self._lists.next_rope_position - self._lists.base

    @property
    def next_rope_position(self) -> int:
        """The RoPE position of the next key."""
        return self._lists.next_rope_position

    def rope_positions(self, count: int = 0) -> AnyArray:
        """RoPE positions by physical row, including the next `count` rows: int64 [1, rows], or [heads, rows] once heads
        differ."""
        return self._lists.by_physical_row(self.length, count)

    def window_positions(self, count: int = 0) -> AnyArray:
        """`rope_positions` of the layers with a sliding window."""
        return self.ring.rope_positions(count) if self.ring else self.rope_positions(count)

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
        keys = np.zeros((self._kv_heads, self.length, self.store.row.key), np.float32)
        for index, own in enumerate(keys):
            head = layer * self._kv_heads + index
            rows, _ = self._rows_of(head)
            own[: rows.size] = self._keys(rows, head)
        return keys

    def _keys(self, rows: AnyArray, head: int) -> FloatArray:
        keys, layer = self.store.keys(rows, head), self.layers[head // self._kv_heads]
        if self.balances and self.balances[layer]:
            keys[:, self.store.row.value :] *= np.float32(2.0 ** -self.balances[layer])
        return keys

    def importance(self, layer: int, learned: RowImportance) -> FloatArray:
        found = np.zeros((self._kv_heads, self.length), np.float32)
        for index, own in enumerate(found):
            head = layer * self._kv_heads + index
            rows, positions = self._rows_of(head)
            keys, row = self._keys(rows, head), self.store.row
            norms = np.linalg.norm(keys[:, : row.value], axis=-1) if row.shared else self.store.value_norms(rows, head)
            own[: rows.size] = learned.predict(keys, positions, norms, self.rope.rotation, self.layers[layer], index)
        return found

    @property
    def foresight(self) -> int:
        return self.rope.foresight(self.next_position)

    def announce(self, count: int) -> None:
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
        if self.ring:
            self.ring.lengthen(between)

    def at_once(self, count: int) -> int:
        """How many of `count` tokens can run one by one between a single `prepare` and `appended`, so that all but the
        first can be truncated again."""
        if self.rope.is_outgrown_by(self.next_position + count):
            return 1
        count = self.state.at_once(count) if self.state else count
        return self.ring.at_once(count) if self.ring else count

    def prepare(self, count: int) -> None:
        """Announce `count` rows, which will be written after the last physical rows."""
        if self.ring:
            self.ring.prepare(count)
        if self.state:
            self.state.prepare()
        self.store.prepare(count, self.next_position)

    def appended(self, count: int, places: Places | None = None) -> None:
        """Record that a pass has written the announced rows. places: None for consecutive positions."""
        self._lists.append(self.lengths, count, places)
        self.lengths += count
        if self.ring:
            self.ring.appended(count)

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
        self._place()

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
        self._place()

    def renumber(self) -> None:
        self._check_open()
        self.settle()
        if not self.length:
            return
        positions, following = self._lists.renumbered(self.lengths[: len(self._lists)])
        for head in range(self._heads):
            rows, found = self._rows_of(head)
            wanted = positions[head % len(positions)]  # the newest rows of all heads are level
            if self.store.observes:
                younger = (following - wanted) / (self.next_rope_position - found)
                self.store.scale_attention(head, rows, younger.astype(np.float32))
            moved = np.flatnonzero(wanted != found)
            if moved.size:
                self._rotate(rows[moved], (wanted - found)[moved], self.rope.rotation, head)
        self._lists.renumber(positions, following)
        self._pinned.forget()
        self._place()

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
            if self.ring:
                self.ring.clear()
            if self.state:
                self.state.clear()
        elif dropped:
            lengths = self.lengths[: len(self._lists)].tolist()
            if self.has_tail:
                self._rewind(self._lists.next_without(lengths[0] - dropped, dropped), dropped, end)
            self._lists.drop(lengths[0] - dropped, dropped)
            self._pinned.forget(np.arange(length, dtype=np.int32))
            self._retain([np.arange(each - dropped, dtype=np.int32) for each in lengths])
            self.store.place(self._lists)

    def _rewind(self, position: int, dropped: int, end: KVState | None) -> None:
        if end is None or end.tail is None:
            if self.ring and (not self.ring.whole or position < self.ring.reach):
                raise RewindError("the rows of sliding windows are gone so far back: run the tokens again")
            if self.state and not self.state.forget(dropped):
                raise RewindError("the state of recurrent layers is gone so far back: run the tokens again")
            if self.ring:
                self.ring.truncate(position)
            return
        base = self._lists.base
        if (end.key, _base_of(end), end.next_position) != (self.key, base, position - base):
            raise RewindError("rows were evicted since the end was saved: run the tokens again")
        self._check_tail(end.tail)
        self._restore_tail(end.tail, base, end.next_position)

    def _parts(self, tail: bytes | memoryview | None) -> tuple[memoryview | None, memoryview | None]:
        """Split a tail into the ring's and the fixed state."""
        if tail is None:
            return None, None
        view = memoryview(tail)
        at = len(view) - (self.state.nbytes if self.state else 0)
        return view[:at], view[at:]

    def _check_tail(self, tail: bytes | memoryview) -> None:
        """Raise InputError for a damaged tail, CapacityError for one that does not fit."""
        ring, state = self._parts(tail)
        if self.ring and ring is not None:
            self.ring.check(ring)
        elif ring:
            raise InputError("the saved state is damaged")
        if self.state and state is not None:
            self.state.check(state)

    def _restore_tail(self, tail: bytes | memoryview | None, base: int, next_position: int) -> None:
        """Restore a tail. None: it follows with the next rows."""
        ring, state = self._parts(tail)
        if self.ring:
            self.ring.restore(ring, base, next_position)
        if self.state:
            self.state.restore(state)

    def _save_tail(self) -> bytes | None:
        """The tail; None if it is not whole."""
        found = [self.ring.save() if self.ring else b"", self.state.save() if self.state else b""]
        return None if None in found else b"".join(filter(None, found))

    def shrink(self, capacity: int) -> None:
        self._check_open()
        check_capacity(capacity, self)
        if capacity >= self.capacity:
            return
        self.settle()
        self.store.shrink(capacity)
        self.capacity = self.store.capacity
        self.store.place(self._lists)

    def save(self, first: int = 0, last: int | None = None) -> KVState:
        self._check_open()
        if not self.alike:
            raise UnsupportedError("a cache whose heads keep different rows cannot be saved yet")
        last, positions = check_range(first, last, self.length), self.positions
        next_position = position_behind(positions, last) if last < self.length else self.next_position
        parts = [np.int64(self._lists.base).tobytes(), *self.store.save(self._lists.physical[0, first:last])]
        tail = self._save_tail() if self.has_tail and last == self.length else None
        return KVState(self.key, positions[first:last].copy(), next_position, b"".join(parts), tail)

    def append(self, state: KVState) -> None:
        self._check_open()
        if not self.length:
            self.rope.adopt(state.key, self.settings)
        check_state(state, self, self.next_position)
        first, count = self.length, state.positions.size
        if len(state.data) != _BASE_BYTES + count * self.store.row_bytes:
            raise InputError("the saved KV rows are damaged")
        base = _base_of(state)
        if self.has_tail and state.tail is not None:
            self._check_tail(state.tail)
        if not self.alike or (first and base != self._lists.base):
            raise InputError("the saved KV rows do not fit behind rows that were evicted since")
        self.store.restore(first, count, memoryview(state.data)[_BASE_BYTES:])
        self._lists.append_saved(first, state.positions, base, state.next_position)
        self.lengths[:] = first + count
        self.store.place(self._lists)
        if self.has_tail and (count or state.tail is not None):
            self._restore_tail(state.tail, base, state.next_position)

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
        if not self.store.row.key:  # of a model without attention
            return
        for part in rotated_at_once(rows.size):
            physical = self._lists.physical[0, rows[part]]
            keys, by = self._pinned.exact(rows[part], self.store.keys(physical), before[part], after[part])
            self.store.set_keys(physical, self.rope.rotation.of(self.layers).rotate_cached(keys, by))

    def _rotate(self, rows: AnyArray, by: AnyArray, rotation: Rotation, head: int | None) -> None:
        """Rotate the keys of physical rows, of one head or of all."""
        keys = self.store.keys(rows, head)
        if head is None:
            rotated = rotation.of(self.layers).rotate_cached(keys, by)
        else:
            rotated = rotation.rotate_cached(keys, by, self.layers[head // self._kv_heads])
        self.store.set_keys(rows, rotated, head)

    def _place(self) -> None:
        """Update store and ring after rows have moved or positions have changed."""
        self.store.place(self._lists)
        if self.ring:
            self.ring.follow(self._lists, self.rope.rotation)

    def _used(self) -> AnyArray:
        """Which logical rows each head has, bool [heads, length]."""
        return np.asarray(np.arange(self.length) < self.lengths[:, None])

    def _by_head(self, values: AnyArray) -> AnyArray:
        """Broadcast [heads, n], or [1, n] if all heads agree, to [layers, KV heads, n]."""
        shape = (len(self.layers), self._kv_heads, values.shape[-1])
        return np.asarray(np.broadcast_to(values[0], shape) if len(values) == 1 else values.reshape(shape))

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the engine is closed")


def _base_of(state: KVState) -> int:
    return int(np.frombuffer(state.data, np.int64, 1)[0])
