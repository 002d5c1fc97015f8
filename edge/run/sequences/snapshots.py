"""Rewinding a sequence: marks, and snapshots with the places of a prompt at which they are taken.

A cache without a tail (`KVState.tail`) can drop any number of its newest rows. Hybrids and models with sliding windows
have a tail: their caches return only to places whose tail was saved; the rows themselves stay in the cache.
"""

from __future__ import annotations

from dataclasses import field

import numpy as np

from edge.backends.kv_cache import KVCache, KVState
from edge.model.chat.thinking import Think
from edge.model.model import Model
from edge.records import dataclass
from edge.types import IntArray


@dataclass(frozen=True)
class Mark:
    """A position in a conversation, to which `Session.rewind` returns; by default the beginning."""

    rows: int = 0
    evicted: int = 0
    left: IntArray = field(default_factory=lambda: np.zeros(0, np.int32))  # tokens that have not been run
    prompts_end: int | None = None
    end: KVState | None = None  # the tail there, if the mark holds it


class Snapshots:
    """The tails of at most `most` places, by row count. The earliest place is dropped first."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._ends: dict[int, KVState] = {}

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def nbytes(self) -> int:
        return sum(len(end.tail or b"") for end in self._ends.values())

    def take(self, kv: KVCache) -> None:
        """Save the cache's tail, if it has one that is not saved yet."""
        rows = kv.length
        if not (self.most and kv.has_tail and rows) or rows in self._ends or kv.earliest > rows:
            return
        while len(self._ends) >= self.most:
            del self._ends[min(self._ends)]
        self._ends[rows] = kv.save(rows)

    def latest(self, rows: int) -> tuple[int, KVState | None]:
        """The last place that has at most `rows` rows: their number, and the end for `KVCache.truncate`."""
        found = max((each for each in self._ends if each <= rows), default=0)
        return found, self._ends.get(found)

    def drop(self, rows: int) -> None:
        """Forget places with this many rows or more."""
        self._ends = {each: end for each, end in self._ends.items() if each < rows}

    def shrink(self, most: int) -> None:
        """Reduce the number of places to `most`."""
        self.most = most
        while len(self._ends) > most:
            del self._ends[min(self._ends)]


@dataclass(frozen=True)
class Outline:
    """Places in a prompt to which a later prompt may return."""

    system: int = 0  # tokens at its beginning: the system prompt, which other conversations share
    opening: int | None = None  # tokens at its end that the template drops with the answer's thoughts; None: none


def changed_opening(model: Model, think: Think) -> tuple[int, IntArray] | None:
    """The number of tokens at a prompt's end that the template drops with the answer's thoughts, and the tokens that it
    writes instead, int32 [n]. None for templates that keep thoughts, and models without thoughts."""
    if model.template is None or model.template.family is None or model.template.keeps_thoughts:
        return None
    opening, past = model.openings(think)
    same = next((at for at, (one, other) in enumerate(zip(opening, past, strict=False)) if one != other), None)
    common = min(opening.size, past.size) if same is None else same
    return opening.size - common, past[common:]
