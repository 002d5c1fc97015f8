"""How many tokens of a draft to verify at once: as many as let the most tokens be expected per second.

With a chance a that a drafted token is right, if those before it are, a pass over n of them and the p tokens before
(one, or those that a grammar forces) yields p + a + a² + … + aⁿ tokens, and takes c(p + n) times as long as a pass over
one. c is measured as passes run, and a is counted, by the length of the match that the draft came from.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from edge.run.drafts import Drafts
from edge.run.report import Drafted
from edge.types import IntArray

_LEAST_GAIN = 1.05  # by which a draft must be expected to pay
_FIRST_COST = (1.4, 0.05)  # of a pass over n > 1 tokens, until it is measured: 1.4 + 0.05 n passes over one
_FIRST_CHANCES = (0.12, 0.25, 0.48, 0.65, 0.8, 0.9, 0.95)  # by ⌊log₂ match⌋, until they are counted
_TRUSTED = 4.0  # tokens for which a first chance counts
_MEMORY = 64.0  # tokens, of the latest that count
_NEWEST = 0.15  # the share of a new pass in a mean time
_OUTLIER = 2.0  # times the mean: another process had the core


@dataclass
class Speculation:
    """The drafts of a sequence, and what became of them: `drafted` tokens, of which `accepted` were right.

    most: tokens that are verified at once.
    """

    most: int
    drafts: Drafts = field(default_factory=Drafts)
    drafted: int = 0
    accepted: int = 0
    _spent: float = 0.0  # seconds of the passes over `_given` tokens, beside drafts
    _given: int = 0
    _times: dict[int, float] = field(default_factory=dict)  # seconds of a pass, by its tokens
    _right: list[float] = field(default_factory=lambda: [a * _TRUSTED for a in _FIRST_CHANCES])
    _tried: list[float] = field(default_factory=lambda: [_TRUSTED] * len(_FIRST_CHANCES))
    _match: int = 0  # of the draft that is verified

    def begin(self) -> None:
        """Another generation begins: count anew."""
        self.drafted = self.accepted = self._given = 0
        self._spent = 0.0

    def report(self) -> Drafted:
        """Of this generation."""
        alone = self._times.get(1)
        gain = (self._given + self.accepted) * alone / self._spent if alone and self._spent else None
        return Drafted(self.drafted, self.accepted, gain)

    def propose(self, most: int, given: int = 1) -> IntArray:
        """The tokens to verify behind the next ones, int32 [n], at most `most`: none where that would not pay. given:
        how many are known, and run in the same pass."""
        draft = self.drafts.draft(max(0, min(most, self.most)))
        return draft[: self._length(draft.size, given)]

    def _length(self, most: int, given: int) -> int:
        if not most:
            return 0
        self._match = place = _bucket(self.drafts.match)
        chance = self._right[place] / self._tried[place]
        best, length, expected = _LEAST_GAIN * given / self._cost(given), 0, float(given)
        for count in range(1, most + 1):
            expected += chance**count
            if (gain := expected / self._cost(given + count)) > best:
                best, length = gain, count
        return length

    def _cost(self, rows: int) -> float:
        """c(rows)."""
        if 1 in self._times and rows in self._times:
            return self._times[rows] / self._times[1]
        base, each = _FIRST_COST
        return base + each * rows if rows > 1 else 1.0

    def time(self, given: int, drafted: int, seconds: float) -> None:
        """A pass over tokens that were known and drafted ones took this long."""
        self._given, self._spent, rows = self._given + given, self._spent + seconds, given + drafted
        before = self._times.setdefault(rows, seconds)
        self._times[rows] = before + _NEWEST * (min(seconds, _OUTLIER * before) - before)

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
