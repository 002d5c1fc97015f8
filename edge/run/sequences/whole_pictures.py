"""Rows of one picture stay in the cache together, or leave it together, whatever rows a policy chooses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from edge.kv.policy import Selection
from edge.model.parts.given import GivenRows
from edge.types import AnyArray, IntArray


class RowPictures:
    """The picture of each row, through evictions: numbers from 1 on, 0 for text.

    given: the rows of ids beyond the vocabulary. since: tokens of the rows since the last eviction.
    """

    def __init__(self) -> None:
        self.given: GivenRows | None = None
        self.clear()

    def clear(self) -> None:
        """Forget all rows."""
        self._stayed: list[IntArray] = []  # at the last eviction: one list, or one of each head; empty: all are text
        self.since = array("i")

    def drop(self, count: int) -> None:
        """Forget the last rows."""
        older = max(0, count - len(self.since))
        del self.since[len(self.since) - (count - older) :]
        self._stayed = [each[: each.size - older] for each in self._stayed]

    def undivided(self, rows: Selection, lengths: Sequence[int], fed: Sequence[int], pinned: int) -> Selection:
        """The rows that stay instead of those that a policy chose, no more of them, and remember their pictures.

        lengths: rows in use, of each list of `rows`. fed: tokens of all rows, before the first eviction; then those of
        `since` count. pinned: first rows, which stay with their pictures; so does a picture that has just come.
        """
        pictures = self._lists(np.array(fed if len(fed) else self.since, np.int32), lengths)
        self.since = array("i")
        if pictures is None:
            self._stayed = []
            return rows
        chosen = [rows] if isinstance(rows, np.ndarray) else [*rows]
        alike = len({each.size for each in chosen}) == 1  # then they stay so
        together = [range(len(chosen))] if alike else [range(at, at + 1) for at in range(len(chosen))]
        kept = [
            each
            for lists in together
            for each in whole_pictures([chosen[at] for at in lists], [pictures[at] for at in lists], pinned)
        ]
        self._stayed = [each[own] for each, own in zip(pictures, kept, strict=True)]
        return kept[0] if isinstance(rows, np.ndarray) else kept

    def _lists(self, tokens: IntArray, lengths: Sequence[int]) -> list[IntArray] | None:
        """The picture of each row, for each list; None if all rows are text."""
        spans = self.given.pictures(tokens) if self.given else []
        if not spans and not any(each.any() for each in self._stayed):
            return None
        older = self._stayed or [np.zeros(each - tokens.size, np.int32) for each in lengths]
        older = older * len(lengths) if len(older) == 1 else older
        newer, last = np.zeros(tokens.size, np.int32), max((int(each.max(initial=0)) for each in older), default=0)
        for begin, end in sorted({(span.begin, span.end) for span in spans}):  # tiles of a picture share theirs
            last += 1
            goes_on = begin < 0 and older[0].size > 0 and older[0][-1] > 0
            newer[max(0, begin) : end] = older[0][-1] if goes_on else last
        return [np.concatenate([each, newer]) for each in older]


def whole_pictures(chosen: Sequence[IntArray], pictures: Sequence[IntArray], pinned: int) -> list[IntArray]:
    """Rows of lists that keep equally many, int32 [n]: of each, at most as many as were chosen.

    A picture stays in all lists or in none: those first of which most was chosen, as long as there is room beside the
    chosen text. Pinned rows' pictures and one at the end always stay if they fit, in place of the oldest text. Room
    that is left goes to the newest text. pictures: of each row; 0: text.
    """
    most, count = chosen[0].size, 1 + max(int(each.max(initial=0)) for each in pictures)
    kept = [np.zeros(each.size, bool) for each in pictures]
    wanted, sizes = np.zeros(count), np.zeros((len(chosen), count), np.int64)
    must = set[int]()
    for at, (rows, own) in enumerate(zip(chosen, pictures, strict=True)):
        kept[at][rows[own[rows] == 0]] = True
        sizes[at] = np.bincount(own, minlength=count)
        wanted += np.bincount(own[rows], minlength=count)
        must |= {*own[:pinned].tolist(), *own[-1:].tolist()} - {0}
    share = wanted / np.maximum(1, sizes.sum(axis=0))
    for picture in sorted(range(1, count), key=lambda each: (each not in must, -share[each], -each)):
        needed = sizes[:, picture]
        free = np.array([most - int(each.sum()) for each in kept])
        if picture in must:
            _drop_text(kept, pictures, needed - free, pinned)
            free = np.array([most - int(each.sum()) for each in kept])
        if (share[picture] or picture in must) and (needed <= free).all():
            for rows, own in zip(kept, pictures, strict=True):
                rows[own == picture] = True
    for rows, own in zip(kept, pictures, strict=True):
        newest = np.flatnonzero((own == 0) & ~rows)[::-1]
        rows[newest[: most - int(rows.sum())]] = True
    return [np.flatnonzero(each).astype(np.int32) for each in kept]


def _drop_text(kept: Sequence[AnyArray], pictures: Sequence[IntArray], counts: AnyArray, pinned: int) -> None:
    """Drop the oldest rows of text that are not pinned, if each list has that many."""
    texts = [np.flatnonzero(rows & (own == 0)) for rows, own in zip(kept, pictures, strict=True)]
    texts = [each[each >= pinned] for each in texts]
    if all(each.size >= count for each, count in zip(texts, counts, strict=True)):
        for rows, text, count in zip(kept, texts, counts.tolist(), strict=True):
            rows[text[: max(0, count)]] = False
