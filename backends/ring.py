"""The KV rows of layers with a sliding window: those of the newest tokens, as many as the window and a chunk need.

Such a layer never reads older rows, so a longer text needs no more memory. The rows are the same in all heads, and no
policy chooses among them. When none is free, the oldest are dropped, a few dozen at a time, and the newest move into
their places: attention does not depend on the order of rows, since positions decide what a token sees.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic

import numpy as np

from edge.backends.kv_cache import CapacityError
from edge.backends.rope import Rotation
from edge.backends.row_lists import RowLists, rotated_at_once
from edge.backends.row_store import Store
from edge.errors import EngineError, InputError
from edge.records import dataclass
from edge.types import AnyArray

SLACK = 64  # rows beyond window and chunk, freed together; a cache can be truncated by at least this many rows
SPARE_SHARE = 8  # a small ring frees 1/8 of its rows together
_ALL, _NONE = -(1 << 60), 1 << 60  # for `_first`
_HEAD_BYTES = 8  # a saved ring begins with `_first`


@dataclass(frozen=True)
class LayerKinds:
    """Layers by the kind of their rows. If all layers have windows, none has a ring: a policy then evicts rows that
    have left the windows."""

    whole: tuple[int, ...]  # layers whose rows a policy keeps or evicts
    ringed: tuple[int, ...]  # layers that have a ring instead
    window: int  # largest window of the ringed layers; 0: there are none

    @classmethod
    def of(cls, windows: Sequence[int], rowless: Collection[int] = ()) -> LayerKinds:
        """Classify layers. windows: [layers], 0 for none. rowless: layers without rows, which are neither; where all
        are, the first one counts the rows, which have no values."""
        layers = [layer for layer in range(len(windows)) if layer not in rowless] or [0]
        whole = tuple(layer for layer in layers if not windows[layer])
        if not whole:
            return cls(tuple(layers), (), 0)
        return cls(whole, tuple(layer for layer in layers if windows[layer]), max(windows))

    def ring_rows(self, capacity: int, chunk: int) -> int:
        """Rows per head of a ring, where other heads have `capacity` rows."""
        return min(capacity, self.window + chunk + SLACK) if self.ringed else 0


class Ring(Generic[Store]):
    """Bookkeeping over a `RowStore` of the layers `layers`. Positions are RoPE positions (row_lists.py)."""

    def __init__(self, store: Store, layers: Sequence[int], window: int) -> None:
        self.store, self._layers = store, layers
        self._lists = RowLists(store.capacity)
        self._saved = window - 1 + SLACK  # the most rows of a saved ring
        self._before = window - 1  # earlier rows that a token sees
        self._spare = max(1, min(SLACK, store.capacity // SPARE_SHARE))
        self._first = _ALL  # rows from this position on are here

    @property
    def length(self) -> int:
        return int(self.store.lengths[0])

    @property
    def reach(self) -> int:
        """The lowest position that the next token may have."""
        return self._first + self._before

    @property
    def whole(self) -> bool:
        """Whether the ring holds all rows that the next token sees."""
        return self._first < _NONE

    def at_once(self, count: int) -> int:
        """How many of `count` rows can be prepared at once so that all but the first can be truncated again."""
        if self.reach > self._lists.next_rope_position + 1:
            return 1
        return max(1, min(count, self.store.capacity - self.length))

    def rope_positions(self, count: int = 0) -> AnyArray:
        """RoPE positions by physical row, including the next `count` rows: int64 [1, rows]."""
        return self._lists.by_physical_row(self.length, count)

    def prepare(self, count: int) -> None:
        """Announce `count` rows, which will be written after the last physical rows."""
        if not self.whole:
            raise EngineError("rows were appended to the KV cache without their tail, and no token can follow them")
        if count > self.store.capacity - self.length:
            self._keep(max(0, self.store.capacity - max(count, self._spare)))
        self.store.prepare(count, self._lists.next_position)

    def appended(self, count: int) -> None:
        self._lists.append(self.store.lengths, count)
        self.store.lengths += count

    def truncate(self, position: int) -> None:
        """Drop rows, so that the next token has `position`, which is at least `reach`."""
        kept = max(0, self.length - (self._lists.next_rope_position - position))
        self._lists.next_rope_position = position
        self._retain(np.arange(kept, dtype=np.int32))

    def clear(self) -> None:
        self._lists.clear()
        self.store.lengths[:] = 0
        self.store.clear()
        self._first = _ALL

    def follow(self, lists: RowLists, rotation: Rotation) -> None:
        """Adjust to changed positions of the other layers' rows, keeping distances to the next token."""
        by = lists.next_rope_position - self._lists.next_rope_position
        if by:
            self.rotate(np.full(self.length, by), rotation)
            self._lists.rope_positions += by
            self._first += by
        self._lists.base, self._lists.next_rope_position = lists.base, lists.next_rope_position
        self.store.place(self._lists)

    def lengthen(self, between: Rotation) -> None:
        """Rotate each key by `between` at its position."""
        self.rotate(self._lists.rope_positions[0, : self.length], between)

    def rotate(self, by: AnyArray, rotation: Rotation) -> None:
        """Rotate the key of row i, oldest first, by `by[i]` more positions."""
        rows, own = self._lists.physical[0, : self.length], rotation.of(self._layers)
        for part in rotated_at_once(rows.size):
            self.store.set_keys(rows[part], own.rotate_cached(self.store.keys(rows[part]), by[part]))

    def save(self) -> bytes | None:
        """The newest rows, with the data for `restore`. None if they are not whole."""
        if not self.whole:
            return None
        count = min(self.length, self._saved)
        rows = self._lists.physical[0, self.length - count : self.length]
        first = self._first if count == self.length else self._lists.next_rope_position - count
        return b"".join([np.int64(first).tobytes(), *self.store.save(rows)])

    def check(self, tail: bytes | memoryview) -> None:
        """Raise InputError for a damaged tail, CapacityError for one that does not fit."""
        count, rest = divmod(len(tail) - _HEAD_BYTES, self.store.row_bytes)
        if count < 0 or rest:
            raise InputError("the saved KV rows are damaged")
        if count > self.store.capacity:
            raise CapacityError(f"{count} saved rows of a sliding window, but only room for {self.store.capacity}")

    def restore(self, tail: bytes | memoryview | None, base: int, next_position: int) -> None:
        """Replace the rows with saved ones. None: the tail follows with the next rows."""
        self.clear()
        count = 0
        if tail is not None:
            count = (len(tail) - _HEAD_BYTES) // self.store.row_bytes
            self.store.restore(0, count, memoryview(tail)[_HEAD_BYTES:])
        self._first = _NONE if tail is None else int(np.frombuffer(tail, np.int64, 1)[0])
        positions = (next_position - count + np.arange(count)).astype(np.int32)
        self._lists.append_saved(0, positions, base, next_position)
        self.store.lengths[:] = count
        self.store.place(self._lists)

    def _keep(self, count: int) -> None:
        """Keep the newest rows."""
        dropped = self.length - count
        self._first = int(self._lists.next_rope_position) - count
        self._retain(np.arange(dropped, self.length, dtype=np.int32))

    def _retain(self, rows: AnyArray) -> None:
        self.store.move(self._lists.retain([rows]))
        self.store.lengths[:] = rows.size
        self.store.place(self._lists)
