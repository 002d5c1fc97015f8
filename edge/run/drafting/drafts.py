"""Drafts of the next tokens, copied from where the text was the same before.

Summaries, edits of code and answers from documents repeat their context. The draft is the continuation of the longest
suffix of the text that also occurs earlier, as in SuffixDecoding (arXiv:2411.04975). That paper keeps a suffix tree.
Here each distance has a byte: the length of the current match with the text that far before. A token updates all of
them in one sweep, some 20 µs for 65,536 tokens of any text.
"""

from __future__ import annotations

import numpy as np

from edge.plan.plan import DRAFT_TEXT
from edge.types import AnyArray, IntArray

DEPTH = 64  # tokens: longer matches count as this length


class Drafts:
    """The tokens of a conversation, and the earlier place that best matches their end.

    match: length of that match in tokens, at most 64; 0: there is none.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(1024, np.int32)
        self._runs = np.zeros(1024, np.uint8)  # lengths of matches by distance, the nearest last
        self._count = self._first = 0  # tokens in all, and tokens before the conversation
        self._behind = 0  # tokens that `_runs` do not include yet; DEPTH: they have to be rebuilt
        self.match = 0

    def clear(self) -> None:
        """Forget all tokens."""
        self._count, self._first, self._behind, self.match = 0, 0, DEPTH, 0

    def begin(self, tokens: IntArray) -> None:
        """Begin a conversation with these tokens, int [n]; those of earlier conversations stay before them."""
        self._first = self._count
        if tokens.size:
            self.add(tokens)

    def drop(self, count: int) -> None:
        """Drop the last `count` tokens, which will be added again."""
        self._count, self._behind = max(self._first, self._count - count), DEPTH

    @property
    def text(self) -> IntArray:
        """The tokens of the conversation, as far as they are kept."""
        return self._tokens[self._first : self._count]

    def add(self, tokens: IntArray) -> None:
        """Append tokens, int [n]. Once there are more than DRAFT_TEXT, older tokens are forgotten."""
        tokens = tokens[-DRAFT_TEXT // 2 :]
        if self._count + tokens.size > DRAFT_TEXT:
            kept = self._tokens[self._count - DRAFT_TEXT // 2 : self._count].copy()
            self._first = max(0, self._first - (self._count - kept.size))
            self._tokens[: kept.size], self._count, self._behind = kept, kept.size, DEPTH
        if self._count + tokens.size > self._tokens.size:
            self._grow(min(DRAFT_TEXT, 2 * (self._count + tokens.size)))
        self._tokens[self._count : self._count + tokens.size] = tokens
        self._count += tokens.size
        self._behind = min(DEPTH, self._behind + tokens.size)

    def _grow(self, size: int) -> None:
        self._tokens = np.resize(self._tokens, size)
        self._runs = np.concatenate([np.zeros(size - self._runs.size, np.uint8), self._runs])

    def draft(self, most: int) -> IntArray:
        """At most `most` tokens that may follow, int32 [n]; none where the last token is new."""
        place = self._find()
        if place < 0:
            return self._tokens[:0]
        follows = self._tokens[place + 1 : self._count][:most]
        return np.resize(follows, most)  # a match nearer than `most` tokens: repeat the period

    def _find(self) -> int:
        """The end of the longest match, the latest of equally long ones; -1: there is none. Sets `match`."""
        if self._behind == DEPTH:
            self._runs.fill(0)
        for last in range(max(0, self._count - self._behind), self._count):
            runs = self._runs_at(last)
            runs += runs < DEPTH
            runs *= (self._tokens[:last] == self._tokens[last]).view(np.uint8)
        runs = self._runs_at(self._count - 1)
        self._behind, self.match = 0, int(runs.max(initial=0))
        return runs.tobytes().rfind(self.match) if self.match else -1

    def _runs_at(self, last: int) -> AnyArray:
        """A view of the match lengths for the places before `last`, in the order of the text, uint8 [last]."""
        return self._runs[self._runs.size - max(0, last) :]
