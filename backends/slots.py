"""Bookkeeping of engines that evict in place, for one line of rows that all heads share, or one line per head.

Three numbers are never one. A row's *order* is its place among the rows in use; its *slot* is where it lies in memory:
evicted rows are overwritten by the last ones, so that most rows never move; its *position* is what RoPE turned its key
by. When gaps are closed, the few rows before a gap are turned forward rather than the many behind it back, so turned
positions grow for ever, and `base` separates them from the positions that callers see.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from edge.types import AnyArray, FloatArray, IntArray

_TURNED_AT_ONCE = 4  # rows: what rotating takes in memory beside the anchors does not grow with their number
_NONE = np.zeros(0, np.int32)


class Anchors:
    """The keys of the first `most` rows, as they were before they were first turned.

    Sinks are turned at every eviction for ever, and each time their keys would be rounded: so theirs are always turned
    from what they were at first.
    """

    def __init__(self, heads: int, head: int, most: int) -> None:
        self._keys = np.empty((heads, most, head), np.float32)  # takes no memory before it is written to
        self._turns = np.zeros(0, np.int64)

    def exact(
        self, rows: AnyArray, keys: FloatArray, turned: AnyArray, wanted: AnyArray
    ) -> tuple[FloatArray, AnyArray]:
        """The keys [heads, n, head] of `rows` [n], and by how much to turn each from `turned` to `wanted`."""
        by, first, have = wanted - turned, int(rows[0]), self._turns.size
        known = max(0, min(first + rows.size, self._keys.shape[1]) - first)
        if known and first <= have and (rows[:known] == np.arange(first, first + known)).all():
            old = max(0, min(have - first, known))
            keys[:, :old] = self._keys[:, first : first + old]
            by[:old] = wanted[:old] - self._turns[first : first + old]
            if old < known:
                self._keys[:, have : first + known] = keys[:, old:known]
                self._turns = np.concatenate([self._turns, turned[old:known]])
        return keys, by

    def forget(self, rows: IntArray = _NONE) -> None:
        """Anchors stay with the first rows only as long as these stay the first: `rows` are kept."""
        known = min(self._turns.size, rows.size)
        same = np.flatnonzero(rows[:known] != np.arange(known))
        left = int(same[0]) if same.size else known
        self._turns = self._turns[:left]


def at_once(count: int) -> Iterator[slice]:
    """Of `count` rows those that are turned together."""
    return (slice(at, at + _TURNED_AT_ONCE) for at in range(0, count, _TURNED_AT_ONCE))


def anchor_bytes(heads: int, head: int, most: int) -> int:
    return 4 * heads * head * most


class Lines:
    """slots, turned: by order, [lines, longest]. base, next: see above; `next` is what the next key is turned by."""

    def __init__(self, longest: int) -> None:
        self.slots = np.zeros((1, longest), np.int32)
        self.turned = np.zeros((1, longest), np.int64)
        self.base = self.next = 0

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def next_position(self) -> int:
        """As callers count."""
        return self.next - self.base

    def positions(self, length: int) -> AnyArray:
        """As callers count, int64 [lines, length]."""
        return np.asarray(self.turned[:, :length] - self.base)

    def clear(self) -> None:
        self.slots, self.turned = self.slots[:1], self.turned[:1]
        self.base = self.next = 0

    def split(self, heads: int) -> None:
        """From here on, a line for each head."""
        if len(self) == 1:
            self.slots, self.turned = np.repeat(self.slots, heads, axis=0), np.repeat(self.turned, heads, axis=0)

    def book(self, lengths: Iterable[int], count: int) -> None:
        """`count` rows that a pass has written behind the last slots; lengths: of the lines before."""
        for line, length in zip(range(len(self)), lengths, strict=False):
            self.slots[line, length : length + count] = np.arange(length, length + count)
            self.turned[line, length : length + count] = np.arange(self.next, self.next + count)
        self.next += count

    def book_level(self, length: int, count: int) -> None:
        """The same where all lines are equally long."""
        new = slice(length, length + count)
        self.slots[:, new], self.turned[:, new] = np.arange(length, new.stop), np.arange(self.next, self.next + count)
        self.next += count

    def book_saved(self, first: int, positions: IntArray, base: int, next_position: int) -> None:
        """Rows that were saved, behind the `first` ones of the only line."""
        new = slice(first, first + positions.size)
        self.slots[0, new] = np.arange(new.start, new.stop)
        self.turned[0, new] = positions.astype(np.int64) + base
        self.base, self.next = base, base + next_position

    def retain(self, rows: Sequence[IntArray]) -> list[AnyArray]:
        """Keep these rows of each line. Returns how rows move, from slot to slot, int32 [n, 2] for each line: slots
        stay gapless, as rows that lie beyond the new length move into holes."""
        moves = []
        for line, kept in enumerate(rows):
            slots, pairs = _fill_holes(self.slots[line, kept])
            self.slots[line, : kept.size] = slots
            self.turned[line, : kept.size] = self.turned[line, kept]
            moves.append(pairs)
        return moves

    def close_gaps(self, count: int) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Give the rows of the only line positions 0 … count − 1. Returns those whose distance to the last row
        changes, what they are turned by, and what they are to be turned by, [n] each."""
        if not count:
            self.base = self.next = 0
            return _NONE, _NONE, _NONE
        turned = self.turned[0, :count]
        self.base = int(turned[-1]) - (count - 1)
        self.next = self.base + count
        wanted = self.base + np.arange(count)
        moved = np.flatnonzero(turned != wanted)
        before = turned[moved]
        turned[moved] = wanted[moved]
        return moved, before, wanted[moved]

    def drop(self, length: int, dropped: int) -> None:
        """The last `dropped` rows will go, and `length` stay. Where lines differ, the newest are what they have in
        common."""
        self.next = int(self.turned[0, length - 1]) + 1 if len(self) == 1 else self.next - dropped


def _fill_holes(slots: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Slots of kept rows, pressed into the first ones: where each row lies then, and the moves, int32 [n, 2]."""
    beyond = slots >= slots.size
    sources = slots[beyond]
    if sources.size == 0:
        return slots, np.zeros((0, 2), np.int32)
    occupied = np.zeros(slots.size, bool)
    occupied[slots[~beyond]] = True
    targets = np.flatnonzero(~occupied).astype(np.int32)
    filled = slots.copy()
    filled[beyond] = targets
    return filled, np.stack([sources, targets], axis=1)
