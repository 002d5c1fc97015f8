"""The host's part of a head in two stages: finding the tiles that may hold the largest logits. TVM is not needed.

`phases/estimate.py` has both stages, and the bounds. k tiles with a lower bound of at least t hold k logits of at least
t, so a tile whose upper bound is below the k-th largest lower bound holds none of the k largest.
"""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.cpu.scratch import Scratch
from edge.backends.tvm.packing.blocks import TILE
from edge.types import FloatArray, IntArray

MOST_CANDIDATES = 64
TILES_EACH = 4  # the fewest tiles of the head for each wanted logit: with fewer, bounds would exclude little
FEW = 0.3  # most surviving tiles: as large a share as the first stage leaves unread of the whole head's bytes
LONGEST = 64  # the most tokens in a row for which the head is read as a whole
_BLOCK = 64  # logits of which one maximum is taken


class TwoStages:
    """Chooses tiles by their bounds, and whether bounds are worth computing.

    upper, lower: the largest upper and lower bounds of each tile, [tokens of a pass, tiles]. tiles: the list for the
    second stage. Counts: the `tokens` (of a draft, all as one) that went through both stages, the `tiles_read` for them
    in the second, and `whole` ones, for which the head was read as a whole, because many tiles had survived before, or
    many logits were wanted.
    """

    def __init__(self, vocab: int, upper: FloatArray, lower: FloatArray, tiles: IntArray) -> None:
        self._vocab, self._upper, self._lower, self._tiles = vocab, upper, lower, tiles
        self._left, self._length = 0, 1
        self.tokens = self.tiles_read = self.whole = 0

    @classmethod
    def of(cls, vocab: int, scratch: Scratch, floats: FloatArray, integers: IntArray) -> TwoStages:
        upper, lower = (
            scratch.array(floats, name).reshape(-1, -(-vocab // TILE)) for name in ("head_upper", "head_lower")
        )
        return cls(vocab, upper, lower, scratch.array(integers, "head_tiles"))

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """The largest lower and upper bounds of every tile, for the first token of the last pass in two stages."""
        return self._lower[0], self._upper[0]

    def go_on(self) -> None:
        """Send the next token through both stages, however many tiles survived before."""
        self._left = 0

    def pays(self, count: int) -> bool:
        """Whether the next token's `count` largest logits are worth two stages."""
        if self._left or count > self._tiles.size // TILES_EACH:
            self._left = max(0, self._left - 1)
            self.whole += 1
            return False
        return True

    def survivors(self, count: int, tokens: int = 1) -> IntArray:
        """The tiles that may hold one of the `count` largest logits of one of the tokens, in ascending order."""
        upper, lower = self._upper[:tokens], self._lower[:tokens]
        if self._vocab % TILE:  # rows of the last tile are no tokens
            upper[:, -1], lower[:, -1] = np.inf, -np.inf
        thresholds = lower.max(axis=1) if count == 1 else np.partition(lower, -count, axis=1)[:, -count]
        found = np.flatnonzero((upper >= thresholds[:, None]).any(axis=0))
        self._tiles[: found.size] = found
        self.tokens, self.tiles_read = self.tokens + 1, self.tiles_read + found.size
        many = found.size > FEW * self._tiles.size
        self._left = self._length if many else 0
        self._length = min(2 * self._length, LONGEST) if many else 1
        return self._tiles[: found.size]

    def largest(self, logits: FloatArray, tiles: IntArray, count: int) -> tuple[IntArray, FloatArray]:
        """The `count` largest logits of these tiles: see `TopEngine.forward_top`."""
        ids = (tiles[:, None] * np.int32(TILE) + np.arange(TILE, dtype=np.int32)).reshape(-1)
        ids = ids[: ids.size - (ids.size and int(ids[-1]) >= self._vocab) * (-self._vocab % TILE)]
        places, values = largest_of(logits[ids], count)
        return ids[places], values


def largest_of(logits: FloatArray, count: int) -> tuple[IntArray, FloatArray]:
    """The `count` largest (all, if there are fewer): see `TopEngine.forward_top`."""
    if count == 1:
        place = logits.argmax()  # the first NaN, if there is one
        return np.array([place], np.int32), np.array(logits[place : place + 1])
    keys = np.where(np.isnan(logits), np.float32(np.inf), logits)
    blocks, least = (
        keys.size // _BLOCK,
        -np.inf,
    )  # the k-th largest maximum of blocks is a lower bound of the k-th largest
    if count < blocks:
        least = np.partition(keys[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1), -count)[-count]
    places = np.flatnonzero(keys >= least)
    order = np.lexsort((places, -keys[places], ~np.isnan(logits[places])))[:count]
    return places[order].astype(np.int32), np.array(logits[places[order]])
