"""Drafts of the next tokens, copied from where the text was the same before.

Summaries, edits of code and answers from documents repeat their context. The longest end of the text so far that also
occurs earlier is looked up, and the tokens that followed it there are the draft, as in SuffixDecoding
(arXiv:2411.04975). That paper keeps a suffix tree; a scan of all tokens takes some 20 µs for 8,000 of them, and 4 bytes
a token are all that it needs.
"""

from __future__ import annotations

import numpy as np

from edge.plan.plan import DRAFT_TEXT
from edge.types import IntArray

DEPTH = 64  # tokens of a match that are told apart from a longer one
SURE = 8  # tokens of a match that no other place is compared with while it goes on
_FEW = 8  # places that are compared token by token, the latest of those that are left


class Drafts:
    """The tokens of a conversation, and the place where they were the same before.

    match: tokens before that place and at the end that are equal, at most 64; 0: there is no such place.
    """

    def __init__(self) -> None:
        self._tokens = np.zeros(1024, np.int32)
        self._count = self._first = 0  # tokens, and those before the conversation
        self._place = -1  # of the token that the last one is equal to
        self.match = 0

    def clear(self) -> None:
        """Forget all tokens."""
        self._count, self._first, self._place, self.match = 0, 0, -1, 0

    def begin(self, tokens: IntArray) -> None:
        """A conversation begins with these tokens. Of those that are here already, the copy is the one to go on."""
        self._first = self._count
        if tokens.size:
            self.add(tokens)

    def drop(self, count: int) -> None:
        """Forget the last tokens: they will be added again."""
        self._count, self._place, self.match = max(self._first, self._count - count), -1, 0

    @property
    def text(self) -> IntArray:
        """The tokens of the conversation, as far as they are kept."""
        return self._tokens[self._first : self._count]

    def add(self, tokens: IntArray) -> None:
        """Tokens, int [n], that follow those before. Of a text longer than DRAFT_TEXT, older ones are forgotten."""
        tokens = tokens[-DRAFT_TEXT // 2 :]
        if self._count + tokens.size > DRAFT_TEXT:
            kept = self._tokens[self._count - DRAFT_TEXT // 2 : self._count].copy()
            self._first = max(0, self._first - (self._count - kept.size))
            self._tokens[: kept.size], self._count, self._place = kept, kept.size, -1
        if self._count + tokens.size > self._tokens.size:
            self._tokens = np.resize(self._tokens, min(DRAFT_TEXT, 2 * (self._count + tokens.size)))
        self._tokens[self._count : self._count + tokens.size] = tokens
        self._count += tokens.size
        follows = tokens.size == 1 and self._place >= 0 and self._tokens[self._place + 1] == tokens[0]
        if follows:  # the same place goes on
            self._place, self.match = self._place + 1, min(DEPTH, self.match + 1)
        else:
            self._place, self.match = -1, 0

    def draft(self, most: int) -> IntArray:
        """At most `most` tokens that may follow, int32 [n]; none where the last token is new."""
        if self.match < SURE:
            self._find()
        if self._place < 0:
            return self._tokens[:0]
        follows = self._tokens[self._place + 1 : self._count][:most]
        return np.resize(follows, most)  # a place so near that the text goes round: it may go on so

    def _find(self) -> None:
        tokens, last = self._tokens[: self._count], self._count - 1
        self._place, self.match = -1, 0
        if last < 1:
            return
        places = np.flatnonzero(tokens[:last] == tokens[last])
        for depth in range(1, 4):  # most places fall away at once
            if places.size <= _FEW:
                break
            longer = places[places >= depth]
            longer = longer[tokens[longer - depth] == tokens[last - depth]]
            if not longer.size:
                break
            places = longer
        for place in places[-_FEW:].tolist():
            match = self._equal(place, last)
            if match >= self.match:  # of equally good places, the latest
                self._place, self.match = place, match

    def _equal(self, place: int, last: int) -> int:
        """The number of tokens up to `place` that are equal to those up to `last`."""
        count = min(DEPTH, place + 1)
        same = self._tokens[place + 1 - count : place + 1] == self._tokens[last + 1 - count : last + 1]
        differs = np.flatnonzero(~same)
        return count - 1 - int(differs[-1]) if differs.size else count
