"""What engines that evict in place share: rows that move into holes, and keys that are turned again and again."""

from __future__ import annotations

import numpy as np

from edge.types import AnyArray, FloatArray, IntArray

_ANCHORS = 16  # first rows whose exact keys are remembered once they are turned


def fill_holes(slots: AnyArray) -> tuple[AnyArray, AnyArray]:
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


class Anchors:
    """The keys of the first rows, as they were before they were first turned.

    Sinks are turned at every eviction for ever, and each time their keys would be rounded: so theirs are always turned
    from what they were at first.
    """

    def __init__(self, heads: int, head: int) -> None:
        self._keys = np.zeros((heads, 0, head), np.float32)
        self._turns = np.zeros(0, np.int64)

    def exact(
        self, rows: AnyArray, keys: FloatArray, turned: AnyArray, wanted: AnyArray
    ) -> tuple[FloatArray, AnyArray]:
        """The keys [heads, n, head] of `rows` [n], and by how much to turn each from `turned` to `wanted`."""
        by, known = wanted - turned, min(int(rows.size), _ANCHORS)
        if (rows[:known] == np.arange(known)).all():
            have = min(known, self._turns.size)
            keys[:, :have] = self._keys[:, :have]
            by[:have] = wanted[:have] - self._turns[:have]
            if have < known:
                self._keys = keys[:, :known].copy()
                self._turns = (wanted - by)[:known]
        return keys, by

    def forget(self, rows: IntArray) -> None:
        """Anchors stay with the first rows only as long as these stay the first: `rows` are kept."""
        known = min(self._turns.size, rows.size)
        same = np.flatnonzero(rows[:known] != np.arange(known))
        left = int(same[0]) if same.size else known
        self._keys, self._turns = self._keys[:, :left], self._turns[:left]
