"""How many tokens of a draft to verify at once: as many as let the most tokens be expected per second.

With a chance a that a drafted token is right, if those before it are, a pass over n of them and the token before yields
1 + a + a² + … + aⁿ tokens, and takes c(n + 1) times as long as a pass over one. c is measured as passes run, and a is
counted, by the length of the match that the draft came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.run.drafts import Drafts
from edge.types import IntArray

MOST_ROWS = 8  # tokens of a pass that verifies: a tile of the products, which reads weights once for all of them
_LEAST_GAIN = 1.05  # by which a draft must be expected to pay
_FIRST_COSTS = (1.0, 1.5, 1.52, 1.55, 1.6, 1.65, 1.7, 1.75)  # by the rows of a pass, until they are measured
_FIRST_CHANCES = (0.15, 0.3, 0.5, 0.65, 0.8, 0.9, 0.95)  # by ⌊log₂ match⌋, until they are counted
_TRUSTED = 4.0  # tokens for which a first chance counts
_MEMORY = 64.0  # tokens, of the latest that count
_NEWEST = 0.15  # the share of a new pass in a mean time
_OUTLIER = 2.0  # times the mean: another process had the core


@dataclass
class Speculation:
    """The drafts of a sequence, and what became of them: `drafted` tokens, of which `accepted` were right; `saved`
    passes."""

    drafts: Drafts = field(default_factory=Drafts)
    drafted: int = 0
    accepted: int = 0
    _times: list[float] = field(default_factory=lambda: [0.0] * MOST_ROWS)  # seconds, by rows
    _right: list[float] = field(default_factory=lambda: [a * _TRUSTED for a in _FIRST_CHANCES])
    _tried: list[float] = field(default_factory=lambda: [_TRUSTED] * len(_FIRST_CHANCES))
    _match: int = 0  # of the draft that is verified

    def propose(self, most: int) -> IntArray:
        """The tokens to verify behind the next one, int32 [n], at most `most`: none where that would not pay."""
        draft = self.drafts.draft(min(most, MOST_ROWS - 1))
        return draft[: self._length(draft.size)]

    def _length(self, most: int) -> int:
        if not most:
            return 0
        self._match = place = _bucket(self.drafts.match)
        chance = self._right[place] / self._tried[place]
        best, length, expected = _LEAST_GAIN, 0, 1.0
        for count in range(1, most + 1):
            expected += chance**count
            if (gain := expected / self._cost(count + 1)) > best:
                best, length = gain, count
        return length

    def _cost(self, rows: int) -> float:
        """c(rows)."""
        one, taken = self._times[0], self._times[rows - 1]
        return taken / one if one and taken else _FIRST_COSTS[rows - 1]

    def time(self, rows: int, seconds: float) -> None:
        """A pass over `rows` tokens took this long."""
        if rows <= MOST_ROWS:
            before = self._times[rows - 1]
            seconds = min(seconds, _OUTLIER * before) if before else seconds
            self._times[rows - 1] = before + _NEWEST * (seconds - before) if before else seconds

    def judge(self, drafted: int, accepted: int) -> None:
        """The model has chosen: of so many drafted tokens, the first `accepted` were right."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        tried = accepted + (accepted < drafted)  # behind the first wrong one nothing was learned
        place = self._match
        kept = min(1.0, _MEMORY / (self._tried[place] + tried))
        self._right[place] = kept * (self._right[place] + accepted)
        self._tried[place] = kept * (self._tried[place] + tried)


def _bucket(match: int) -> int:
    return min(len(_FIRST_CHANCES) - 1, max(match, 1).bit_length() - 1)
