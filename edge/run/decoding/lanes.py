"""Texts that a search extends side by side: a pass runs the next token of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge.backends.base import BatchedEngine
from edge.types import FloatArray

Tokens = tuple[int, ...]

_BLOCK = 256  # rows that are copied at once


def common(one: Tokens, other: Tokens) -> int:
    """The number of first tokens that two texts share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Lanes:
    """The sequences of an engine, each with the rows of a beam's text behind the same prompt. A text that is continued
    in two ways is copied, as the branches of a fork are."""

    def __init__(self, engine: BatchedEngine, count: int, start: int) -> None:
        """start: rows of the prompt, which sequence 0 has."""
        self._engine, self._all, self._start = engine, [engine.sequence(number) for number in range(count)], start
        self._held: list[Tokens | None] = [(), *[None] * (count - 1)]  # None: nothing yet

    @property
    def capacity(self) -> int:
        """Rows for which all sequences have room."""
        return min(each.kv.capacity for each in self._all)

    def run(self, texts: Sequence[Tokens]) -> FloatArray:
        """Run the last token of each text, whose other tokens have run. Returns the logits behind it, float32 [texts,
        vocab]."""
        free, chosen = list(range(len(self._all))), [-1] * len(texts)
        for at, text in enumerate(texts):  # the first continuation of a beam has its sequence
            chosen[at] = next((each for each in free if self._held[each] == text[:-1]), -1)
            free = [each for each in free if each != chosen[at]]
        for at, text in enumerate(texts):  # the others have copies of it
            if chosen[at] < 0:
                chosen[at] = free.pop()
                self._copy(self._held.index(text[:-1]), chosen[at])
        logits = self._engine.forward_batch(np.array([text[-1] for text in texts], np.int32), chosen)
        for text, place in zip(texts, chosen, strict=True):
            self._held[place] = tuple(text)
        return logits

    def _copy(self, source: int, target: int) -> None:
        rows, kv, held = self._all[source].kv, self._all[target].kv, self._held[target]
        shared = 0 if held is None or kv.has_tail else self._start + common(held, self._held[source] or ())
        kv.truncate(shared)
        for first in range(shared, rows.length, _BLOCK):
            kv.append(rows.save(first, min(first + _BLOCK, rows.length)))
        self._held[target] = self._held[source]

    def close(self) -> None:
        """Free the rows of all but the first, which is the conversation's."""
        for each in self._all[1:]:
            each.kv.truncate(0)
