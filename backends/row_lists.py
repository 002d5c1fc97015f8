"""Bookkeeping of KV rows: their places in memory, and the RoPE positions of their keys.

A *logical row* is a row's place among the rows in use, oldest first; its *physical row* is its place in memory. Rows
from the end move into the holes that evicted ones leave, so most rows never move. A key's *RoPE position* is the
position that it is rotated to: closing a gap rotates the few keys before it forward rather than the many behind it
back, so RoPE positions only grow. Callers see positions that are smaller by `base`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edge.model.parts.places import Places
from edge.types import AnyArray, FloatArray, IntArray

ROTATED_AT_ONCE = 4  # rows, so that the memory of rotating does not grow with the number of pinned rows
_NONE = np.zeros(0, np.int32)


class RowLists:
    """One list of rows while all heads keep the same ones, otherwise one list per head of every layer.

    physical, rope_positions: by logical row, [lists, longest]. next_rope_position: of the next key.
    """

    def __init__(self, longest: int) -> None:
        self.physical = np.zeros((1, longest), np.int32)
        self.rope_positions = np.zeros((1, longest), np.int64)
        self.base = self.next_rope_position = 0

    def __len__(self) -> int:
        return len(self.physical)

    @property
    def next_position(self) -> int:
        """The next position as callers see it."""
        return self.next_rope_position - self.base

    def positions(self, length: int) -> AnyArray:
        """Positions as callers see them, int64 [lists, length]."""
        return np.asarray(self.rope_positions[:, :length] - self.base)

    def by_physical_row(self, length: int, count: int) -> AnyArray:
        """RoPE positions of `length` rows and of the next `count`, by physical row: int64 [lists, rows]."""
        found = np.empty((len(self), length + count), np.int64)
        physical = self.physical[:, :length].astype(np.int64)
        np.put_along_axis(found, physical, self.rope_positions[:, :length], axis=1)
        found[:, length:] = self.next_rope_position + np.arange(count)
        return found

    def clear(self) -> None:
        self.physical, self.rope_positions = self.physical[:1], self.rope_positions[:1]
        self.base = self.next_rope_position = 0

    def split(self, heads: int) -> None:
        """Give each head a list of its own."""
        if len(self) == 1:
            self.physical = np.repeat(self.physical, heads, axis=0)
            self.rope_positions = np.repeat(self.rope_positions, heads, axis=0)

    def append(self, lengths: IntArray, count: int, places: Places | None = None) -> None:
        """Add `count` rows that a pass has written after the last physical rows. lengths: of the lists before. places:
        of the rows; None: they have consecutive positions."""
        each, own = np.arange(len(self.physical))[:, None], np.arange(count)
        physical = lengths[: len(self.physical), None] + own
        self.physical[each, physical] = physical
        if places is None:
            self.rope_positions[each, physical] = self.next_rope_position + own
            self.next_rope_position += count
        else:
            self.rope_positions[each, physical] = self.base + places.numbers.astype(np.int64)
            self.next_rope_position = self.base + places.next_position

    def append_saved(self, first: int, positions: IntArray, base: int, next_position: int) -> None:
        """Add saved rows after the `first` ones of the only list."""
        new = slice(first, first + positions.size)
        self.physical[0, new] = np.arange(new.start, new.stop)
        self.rope_positions[0, new] = positions.astype(np.int64) + base
        self.base, self.next_rope_position = base, base + next_position

    def retain(self, rows: Sequence[IntArray]) -> list[AnyArray]:
        """Keep these logical rows of each list. Returns the moves of physical rows, pairs int32 [n, 2] for each list.

        Rows beyond the new length move into holes, so that rows in use stay contiguous.
        """
        moves = []
        for each, kept in enumerate(rows):
            physical, pairs = _fill_holes(self.physical[each, kept])
            self.physical[each, : kept.size] = physical
            self.rope_positions[each, : kept.size] = self.rope_positions[each, kept]
            moves.append(pairs)
        return moves

    def close_gaps(self, count: int) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Give the first rows of the only list positions from 0 on, without gaps.

        Returns the logical rows whose distance to the last row changes, and their RoPE positions before and after.
        """
        if not count:
            self.base = self.next_rope_position = 0
            return _NONE, _NONE, _NONE
        found = self.rope_positions[0, :count]
        wanted = without_gaps(found)
        self.base = int(found[-1] - wanted[-1])
        self.next_rope_position = int(found[-1]) + 1
        wanted += self.base
        moved = np.flatnonzero(found != wanted)
        before = found[moved]
        found[moved] = wanted[moved]
        return moved, before, wanted[moved]

    def renumbered(self, lengths: IntArray) -> tuple[list[AnyArray], int]:
        """Positions without gaps for each list's rows, which end alike in all lists, and the next one. lengths: of the
        lists."""
        found = [without_gaps(each[:length]) for each, length in zip(self.rope_positions, lengths, strict=True)]
        following = max(int(each[-1]) + 1 for each in found if each.size)
        return [each + (following - 1 - each[-1:]) for each in found], following

    def renumber(self, positions: Sequence[AnyArray], following: int) -> None:
        """Take what `renumbered` returned."""
        for own, each in zip(self.rope_positions, positions, strict=True):
            own[: each.size] = each
        self.base, self.next_rope_position = 0, following

    def next_without(self, length: int, dropped: int) -> int:
        """The next RoPE position after dropping the last `dropped` rows, when `length` of the first list stay. All
        lists have the same newest rows, of which those of a picture share positions."""
        if len(self) > 1:
            return max(self.next_rope_position - dropped, int(self.rope_positions[0, length]))
        return int(self.rope_positions[0, length - 1]) + 1

    def drop(self, length: int, dropped: int) -> None:
        """Drop the last `dropped` rows; `length` of the first list stay."""
        self.next_rope_position = self.next_without(length, dropped)


def without_gaps(positions: AnyArray) -> AnyArray:
    """Positions from 0 on whose rows keep their distances up to 1: a picture's rows, which share some, stay as they
    are, and behind them and before them follows what did not leave."""
    steps: AnyArray = np.minimum(np.diff(positions, prepend=positions[:1]), 1)
    return np.cumsum(steps)


def _fill_holes(physical: AnyArray) -> tuple[AnyArray, AnyArray]:
    """Move rows into the first places; return each row's new place, and the moves, int32 [n, 2]."""
    beyond = physical >= physical.size
    sources = physical[beyond]
    if sources.size == 0:
        return physical, np.zeros((0, 2), np.int32)
    occupied = np.zeros(physical.size, bool)
    occupied[physical[~beyond]] = True
    targets = np.flatnonzero(~occupied).astype(np.int32)
    filled = physical.copy()
    filled[beyond] = targets
    return filled, np.stack([sources, targets], axis=1)


class PinnedKeys:
    """The original keys of at most `most` first rows, from before they were rotated in the cache.

    Sinks are rotated at every eviction, and each time rounding would add an error. So they are always rotated from
    their original values.
    """

    def __init__(self, heads: int, key: int, most: int) -> None:
        self._keys = np.empty((heads, most, key), np.float32)  # takes no memory before it is written to
        self._rope_positions = np.zeros(0, np.int64)

    def exact(self, rows: AnyArray, keys: FloatArray, before: AnyArray, after: AnyArray) -> tuple[FloatArray, AnyArray]:
        """The best known keys [heads, n, key] of logical `rows` [n], and the rotation that takes each to `after`."""
        by, first, have = after - before, int(rows[0]), self._rope_positions.size
        known = max(0, min(first + rows.size, self._keys.shape[1]) - first)
        if known and first <= have and (rows[:known] == np.arange(first, first + known)).all():
            old = max(0, min(have - first, known))
            keys[:, :old] = self._keys[:, first : first + old]
            by[:old] = after[:old] - self._rope_positions[first : first + old]
            if old < known:
                self._keys[:, have : first + known] = keys[:, old:known]
                self._rope_positions = np.concatenate([self._rope_positions, before[old:known]])
        return keys, by

    def forget(self, rows: IntArray = _NONE) -> None:
        """Drop keys that no longer belong to the first rows when logical `rows` stay."""
        known = min(self._rope_positions.size, rows.size)
        moved = np.flatnonzero(rows[:known] != np.arange(known))
        self._rope_positions = self._rope_positions[: int(moved[0]) if moved.size else known]


def pinned_bytes(heads: int, key: int, most: int) -> int:
    """Bytes of `PinnedKeys`."""
    return 4 * heads * key * most


def rotated_at_once(count: int) -> Iterator[slice]:
    """Slices of `count` rows that are rotated together."""
    return (slice(at, at + ROTATED_AT_ONCE) for at in range(0, count, ROTATED_AT_ONCE))
