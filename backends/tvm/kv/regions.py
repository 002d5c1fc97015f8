"""The arena's division into regions, one per head, that hold the heads' rows.

Layers with a ring of rows (edge.backends.ring) have the first part of the arena, or one of their own if their rows have
other sizes; the other layers have the rest. At first all regions of a part have the same size. Once heads keep
different numbers of rows, every eviction divides their part anew, so that all heads have the same number of free rows.
"""

from __future__ import annotations

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.ring import LayerKinds
from edge.records import dataclass
from edge.types import AnyArray, IntArray

TILE = 16  # rows: keys lie in tiles, so regions begin with one
SPARE_TILES = 4  # the most that are scored at once: kernels may read, but do not use, tiles after the last
SPARE_ROWS = SPARE_TILES * TILE  # after the last head


@dataclass(frozen=True)
class Move:
    """A move of rows of one head; source and target count from the start of the arena."""

    source: int
    target: int
    count: int


class Regions:
    """The regions of some heads.

    starts: first row of each head in the arena, int32 [heads]. limits: rows that each head may hold. first: row of the
    arena where the regions begin. size: their total rows, reduced by `shrink`. capacity: average rows per head.
    longest: most rows that one head may hold. uneven: heads may keep different numbers of rows; each region then has
    one tile more. layers: that have the same regions, one after the other: an encoder's pass needs no layer's rows in
    the next one.
    """

    def __init__(
        self, heads: int, capacity: int, longest: int, *, uneven: bool, first: int = 0, layers: int = 1
    ) -> None:
        self.capacity, self.longest, self.uneven, self.first = capacity, longest, uneven, first
        self._even, self._apart = allocated_rows(capacity, uneven=uneven), heads // layers
        self.size = self._apart * self._even
        self.starts: IntArray = np.zeros(heads, np.int32)
        self.limits = np.zeros(heads, np.int32)
        self.make_even()

    def make_even(self) -> None:
        """Make all regions equally large, without moving rows."""
        self.starts[:] = self.first + np.arange(len(self.starts)) % self._apart * self._even
        self.limits[:] = self.capacity

    def shrink(self, capacity: int, lengths: IntArray) -> list[Move]:
        """Reduce the capacity to the regions' first rows. Returns moves like `share_out`."""
        self.capacity = capacity
        self._even = allocated_rows(capacity, uneven=self.uneven)
        self.size = self._apart * self._even
        if self.uneven:
            return self.share_out(lengths)
        before = self.starts.copy()
        self.make_even()
        return self._moves(before, lengths)

    def rows(self, slots: AnyArray) -> AnyArray:
        """Rows of the arena, [heads, n], for the same slots in all heads."""
        return np.asarray(self.starts[:, None] + slots)

    def share_out(self, lengths: IntArray) -> list[Move]:
        """Divide the rows among heads that keep `lengths` of them, at most `capacity` on average, with equal free room.

        Returns the necessary moves, ordered so that none overwrites rows that have yet to move.
        """
        heads, before = len(self.starts), self.starts.copy()
        free = min(self.capacity - -(-int(lengths.sum()) // heads), self.longest - int(lengths.max()))
        self.limits[:] = lengths + free
        sizes = -(-self.limits // TILE) * TILE
        self.starts[:] = self.first + np.cumsum(sizes) - sizes
        return self._moves(before, lengths)

    def _moves(self, before: IntArray, lengths: IntArray) -> list[Move]:
        """Moves from the starts `before`, ordered so that none overwrites rows that have yet to move."""
        moves = [
            Move(int(before[head]), int(self.starts[head]), int(lengths[head]))
            for head in range(len(before))
            if lengths[head] and before[head] != self.starts[head]
        ]
        down = [move for move in moves if move.target < move.source]
        up = [move for move in moves if move.target > move.source]
        return down + up[::-1]


def make_regions(
    kinds: LayerKinds, kv_heads: int, config: EngineConfig, context: int, apart: int = 0, sequence: int = 0, *,
    shared: bool = False,
) -> tuple[Regions, Regions]:  # fmt: skip
    """The regions of layers whose rows a policy chooses, and those of rings, which lie before them. The sequences lie
    one after the other.

    apart: KV heads of layers with rings, if these have an arena of their own; 0: the rings lie in the same one. shared:
    all layers have the same regions.
    """
    ring_rows = kinds.ring_rows(config.capacity, config.chunk)
    longest = longest_head(config.capacity, context, uneven=config.uneven)
    heads, ring_heads = len(kinds.whole) * kv_heads, len(kinds.ringed) * (apart or kv_heads)
    size = heads * allocated_rows(config.capacity, uneven=config.uneven)
    ring_size = ring_heads * allocated_rows(ring_rows, uneven=False)
    rings_first = sequence * (ring_size if apart else size + ring_size)
    first = sequence * size if apart else rings_first + ring_size
    rings = Regions(ring_heads, ring_rows, ring_rows, uneven=False, first=rings_first)
    layers = len(kinds.whole) if shared else 1
    return Regions(heads, config.capacity, longest, uneven=config.uneven, first=first, layers=layers), rings


def allocated_rows(capacity: int, *, uneven: bool) -> int:
    """Average rows allocated per head: whole tiles, and one more if heads may differ, since each region wastes a
    part."""
    return -(-capacity // TILE) * TILE + TILE * uneven


def longest_head(capacity: int, context: int, *, uneven: bool) -> int:
    """The most rows that one head may hold, which sizes its scratch and bookkeeping."""
    return max(capacity, min(LONGEST_SHARE * capacity, context)) if uneven else capacity


LONGEST_SHARE = 3  # times the average; PyramidKV's first layers get less than twice
