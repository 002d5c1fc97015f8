"""Where the tokens of a pass stand: their positions, and the first and the last token that each of them sees.

The row that a token gets in the cache, its position and the limit of what it sees are three numbers. A picture's rows
follow each other, but share positions; and all of a span may see each other, whatever their rows. Texts of an encoder
that run in one pass see their own tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edge.errors import InputError
from edge.records import dataclass
from edge.types import IntArray


@dataclass(frozen=True)
class Places:
    """The places of n tokens. Positions have one component, or those of `Rope.sections`: time, height, width."""

    positions: IntArray  # int32 [n], or [n, components]
    sees: IntArray  # int32 [n]: the index of the last token that each sees: itself, or the end of its span
    begins: IntArray | None = None  # int32 [n], of encoders: the index of the first one; None: the first of all
    types: IntArray | None = None  # int32 [n], of encoders: rows of the table of token types; None: the first row
    floor: int = -1  # the largest component so far, of the tokens before these

    @classmethod
    def after(cls, position: int, count: int, *, causal: bool = True) -> Places:
        """Consecutive positions from `position` on. causal: tokens see those before them; otherwise all."""
        own = np.arange(count, dtype=np.int32)
        return cls(position + own, own if causal else np.full(count, count - 1, np.int32))

    @classmethod
    def of_texts(cls, sizes: Sequence[int], types: IntArray | None = None) -> Places:
        """Whole texts of an encoder, side by side, each with positions from 0 on."""
        begins = np.repeat(np.cumsum([0, *sizes[:-1]]), sizes).astype(np.int32)
        sees = np.repeat(np.cumsum(sizes) - 1, sizes).astype(np.int32)
        return cls(np.arange(begins.size, dtype=np.int32) - begins, sees, begins, types)

    @property
    def consecutive(self) -> bool:
        """Whether positions are plain numbers, each one larger than the one before."""
        return self.positions.ndim == 1 and bool((np.diff(self.positions) == 1).all())

    @property
    def numbers(self) -> IntArray:
        """One position of each token, int32 [n], by which the cache orders rows: the largest component so far."""
        if self.positions.ndim == 1:
            return self.positions
        return np.asarray(np.maximum(np.maximum.accumulate(self.positions.max(axis=1)), self.floor), np.int32)

    @property
    def next_position(self) -> int:
        """The position behind these."""
        return max(int(self.positions.max()), self.floor) + 1

    def part(self, tokens: slice) -> Places:
        """The places of some of the tokens, between which and the others no span lies."""
        begins, types = (None if each is None else each[tokens] for each in (self.begins, self.types))
        begins = None if begins is None else begins - tokens.start
        floor = int(self.numbers[tokens.start - 1]) if tokens.start else self.floor
        return Places(self.positions[tokens], self.sees[tokens] - tokens.start, begins, types, floor)

    def passes(self, chunk: int) -> Iterator[slice]:
        """Passes of at most `chunk` tokens that divide no span. Raises InputError for a longer span."""
        start, count = 0, len(self.sees)
        while start < count:
            sees = self.sees[start : start + chunk]
            ends = np.flatnonzero(sees == start + np.arange(sees.size))  # `sees` never decreases
            if not ends.size:
                raise InputError(f"a span of more than {chunk} tokens does not fit in a pass: choose a larger chunk")
            yield slice(start, start + int(ends[-1]) + 1)
            start += int(ends[-1]) + 1

    def check(self, count: int, position: int, components: int) -> None:
        """Raise InputError unless these are the places of `count` tokens behind `position`, whose positions have
        `components` components (0: one)."""
        own, sees = np.arange(count), self.sees
        fits = self.positions.shape in ((count,), (count, components)) and sees.shape == (count,)
        if not fits or (sees < own).any() or (sees >= count).any() or (np.diff(sees) < 0).any():
            raise InputError(f"these are not the places of {count} tokens")
        first = self.positions if self.positions.ndim == 1 else self.numbers + 1  # a picture may go on
        if first.min(initial=position) < position:
            raise InputError(f"positions begin before {position}, the next one")
