"""Where the rows of each head lie: one head after the other in one arena, each in a region as long as it needs.

At first all regions are alike. Once heads keep different numbers of rows, the arena is divided anew at every eviction,
so that all heads have equally many free rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.backends.tvm.memory import aligned_zeros
from edge.types import AnyArray, IntArray

TILE = 16  # rows: keys lie in tiles, so regions begin with one


@dataclass(frozen=True)
class Move:
    """Rows of one head that change their place, counted from the start of the arena."""

    source: int
    target: int
    count: int


class Regions:
    """starts: first row of each head, int32 [heads]; compiled code reads it. limits: rows that each head may hold.

    size: rows of the arena, of which the first `used` are. capacity: rows per head on average, longest: the most that
    one head may hold. uneven: heads may differ, for which every head gets a tile more.
    """

    def __init__(self, heads: int, capacity: int, longest: int, *, uneven: bool) -> None:
        self.capacity, self.longest, self.uneven = capacity, longest, uneven
        self._even = allocated_rows(capacity, uneven=uneven)
        self.size = self.used = heads * self._even
        self.starts: IntArray = aligned_zeros(heads, "int32")
        self.limits = np.zeros(heads, np.int32)
        self.make_even()

    def make_even(self) -> None:
        """All regions alike. What lies there is not moved."""
        self.starts[:] = np.arange(len(self.starts)) * self._even
        self.limits[:] = self.capacity

    def shrink(self, capacity: int, lengths: IntArray) -> list[Move]:
        """Room for `capacity` rows per head from here on, at the arena's beginning. Returns moves as `share_out`."""
        self.capacity = capacity
        self._even = allocated_rows(capacity, uneven=self.uneven)
        self.used = len(self.starts) * self._even
        if self.uneven:
            return self.share_out(lengths)
        before = self.starts.copy()
        self.make_even()
        return self._moves(before, lengths)

    def rows(self, slots: AnyArray) -> AnyArray:
        """Rows of the arena, [heads, n], for the same slots of all heads."""
        return np.asarray(self.starts[:, None] + slots)

    def share_out(self, lengths: IntArray) -> list[Move]:
        """Divide the arena for heads that keep `lengths` rows, with equally many free ones for all.

        Returns the moves that this takes, in an order in which none overwrites what is still to be moved. `lengths`
        may not be more than `capacity` on average.
        """
        heads, before = len(self.starts), self.starts.copy()
        free = min(self.capacity - -(-int(lengths.sum()) // heads), self.longest - int(lengths.max()))
        self.limits[:] = lengths + free
        sizes = -(-self.limits // TILE) * TILE
        self.starts[:] = np.cumsum(sizes) - sizes
        return self._moves(before, lengths)

    def _moves(self, before: IntArray, lengths: IntArray) -> list[Move]:
        """From where regions began `before`, in an order in which none overwrites what is still to be moved."""
        moves = [
            Move(int(before[head]), int(self.starts[head]), int(lengths[head]))
            for head in range(len(before))
            if lengths[head] and before[head] != self.starts[head]
        ]
        down = [move for move in moves if move.target < move.source]
        up = [move for move in moves if move.target > move.source]
        return down + up[::-1]


def allocated_rows(capacity: int, *, uneven: bool) -> int:
    """Of a head on average: whole tiles, and where heads may differ one more, as each region wastes a part of one."""
    return -(-capacity // TILE) * TILE + TILE * uneven


def longest_head(capacity: int, context: int, *, uneven: bool) -> int:
    """The most rows that one head may hold. Scratch and bookkeeping are as large for all."""
    return max(capacity, min(_LONGEST_SHARE * capacity, context)) if uneven else capacity


_LONGEST_SHARE = 3  # times the average; PyramidKV's first layers get less than twice
