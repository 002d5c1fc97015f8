"""Tokens that run ahead of an answer: choices of the engine, and drafts, whose number is the one with the most expected
tokens per second.

Let a be the chance that a drafted token is right if those before it are. A pass over n of them and the p tokens before
(one, or those that a grammar forces) yields p + a + a² + … + aⁿ tokens, and takes c(p + n) times as long as a pass over
one. c is measured as passes run, by context length, since each token reads its rows separately; lengths that have not
run are interpolated. a is counted, by the length of the match that the draft came from. The first token of an unused
draft is compared with the next token, so that drafts that were long wrong are tried again once they would be right.
Counted on few tokens, a is as likely too high as too low, but only an overestimate costs passes: drafts have to pay by
a lower bound of a. (Counting a by the place in the draft, too, made no text faster.) Where a sensor measures joules, c
is the larger of the ratios of seconds and of joules.

A model's draft costs n · d of these times more. Of both drafts, the one with the higher expected gain is verified.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import deque
from dataclasses import field
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from edge.backends.base import PickingEngine, VerifyingEngine
from edge.records import dataclass
from edge.run.drafting.drafter import Drafter
from edge.run.drafting.drafts import Drafts
from edge.run.report import Drafted
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.run.drafting.power import PassPower

IN_VAIN = 4  # one in four of the tokens that the engine chooses may be wasted after the end of the answer
BURST_S = 0.05  # the longest burst: text still flows, and budgets and callers are checked in time

LEAST_GAIN = 1.05  # the least expected speedup of a draft
CAUTION = 0.25  # standard errors subtracted from a counted chance
FIRST_COST = (1.4, 0.05)  # of a pass over n > 1 tokens, until it is measured: 1.4 + 0.05 n passes over one
FIRST_CHANCES = (0.12, 0.25, 0.48, 0.65, 0.8, 0.9, 0.95)  # by ⌊log₂ match⌋, until they are counted
_MODEL, FIRST_OF_MODEL = len(FIRST_CHANCES), 0.7  # the index of a model that drafts, after those of matches
TRUSTED = 4.0  # weight of a first chance, in tokens
MEMORY = 64.0  # most tokens that count: older ones lose their weight
_CAUGHT_UP = 2  # tokens of the text that a model has to run for its next draft, if the last one was right
CONTEXTS = (1024, 4096, 16384)  # rows: bounds of the context lengths that are timed separately
FEW = 3  # passes before a mean counts: until then the shortest, since the first may read weights from the disk
NEWEST = 0.15  # weight of a new pass in a mean time
OUTLIER = 2.0  # × the mean: longer times are cut to this, since another process had the core

Outcome = FloatArray | tuple[IntArray, FloatArray] | int  # all logits, those of the likeliest, or the engine's choice


@dataclass
class Ahead:
    """Tokens after a sequence's pending ones that have already been run, with the outcomes of their passes. Their rows
    are the last ones of the cache. Of this generation's drafts, `drafted` tokens were verified, and `accepted` right.

    most: drafted tokens verified in a pass; 0: none. model: drafts where it promises more than copied text. vocab: ids
    from here on are no tokens of a text. power: of passes; None where joules are estimated.
    """

    most: int
    model: Drafter | None = None
    vocab: int = np.iinfo(np.int32).max
    power: PassPower | None = None
    drafts: Drafts = field(default_factory=Drafts)
    drafted: int = 0
    accepted: int = 0
    unsettled: int = 0  # tokens of the draft in the last pass, until `settle` judges them
    _queue: deque[tuple[int, Outcome]] = field(default_factory=deque)
    _pace: float = BURST_S  # seconds per token that the engine chose
    _spent: float = 0.0  # seconds of passes, and of the model's drafts
    _tokens: list[int] = field(default_factory=lambda: [0] * (len(CONTEXTS) + 1))  # given or accepted, by context
    # Mean seconds of a pass and the number of passes, by context and by tokens in the pass.
    _times: list[dict[int, tuple[float, int]]] = field(default_factory=lambda: [{} for _ in range(len(CONTEXTS) + 1)])
    _context: int = 0  # of the newest pass
    _model_s: float | None = None  # per token that the model drafts
    _right: list[float] = field(default_factory=lambda: [a * TRUSTED for a in (*FIRST_CHANCES, FIRST_OF_MODEL)])
    _tried: list[float] = field(default_factory=lambda: [TRUSTED] * (len(FIRST_CHANCES) + 1))
    _match: int = 0  # the index in `_right` of the draft that is verified
    _untried: tuple[int, int] | None = None  # the index of a draft that is not verified, and its first token

    def clear(self) -> None:
        """Forget the tokens run ahead, along with their conversation."""
        self._queue.clear()
        self.unsettled, self._pace = 0, BURST_S

    def begin(self) -> None:
        """Begin another generation: reset the counts, and a low chance of the model, since its text may be easier."""
        self._pace = BURST_S
        if self._right[_MODEL] < FIRST_OF_MODEL * self._tried[_MODEL]:
            self._right[_MODEL], self._tried[_MODEL] = FIRST_OF_MODEL * TRUSTED, TRUSTED
        self.drafted = self.accepted = 0
        self._spent, self._tokens, self._untried = 0.0, [0] * (len(CONTEXTS) + 1), None

    # The text so far

    def restart(self, tokens: IntArray) -> None:
        """Begin a text with these tokens, int32 [n]."""
        if self.model:
            self.drafts.begin(tokens[tokens < self.vocab])

    def note(self, tokens: IntArray) -> None:
        """Continue the text with these tokens, int32 [n]; those of an answer come one by one."""
        if not self.most:
            return
        if self._untried and tokens.size == 1:
            place, first = self._untried
            self._learn(place, 1, int(tokens[0] == first))
        self._untried = None
        self.drafts.add(tokens[tokens < self.vocab])

    # Tokens that were run

    def begins_with(self, tokens: list[int]) -> bool:
        return [token for token, _ in islice(self._queue, len(tokens))] == tokens

    def take(self, token: int) -> Outcome | None:
        """Remove the token, which the answer has reached, and return its outcome; None if it was not run ahead."""
        if not self._queue or self._queue[0][0] != token:
            return None
        return self._queue.popleft()[1]

    def burst(self, answered: int) -> int:
        """Most tokens that the engine chooses in one burst, in an answer of `answered` tokens so far."""
        return min(1 + answered // IN_VAIN, int(BURST_S / self._pace))

    def verify(
        self, engine: VerifyingEngine, tokens: IntArray, draft: IntArray, top: int = 0
    ) -> tuple[int, int, Outcome]:  # fmt: skip
        """Run pending tokens and the draft after them, and keep the part of the draft that was run. top: the largest
        logits that are enough; 0: all are needed.

        Returns the number of tokens that have been run, the number of pending ones among them, and the outcome of the
        last of these.
        """
        together = np.concatenate([tokens, draft]) if draft.size else tokens
        found = engine.verify_top(together, top) if top else engine.verify(together)
        pending = min(tokens.size, len(found))
        outcome, *others = list[Outcome](found[pending - 1 :])
        self.unsettled = len(others)
        self._queue.extend(zip(draft.tolist(), others, strict=False))
        return len(found), pending, outcome

    def choose(self, engine: PickingEngine, token: int, count: int, banned: IntArray) -> list[int]:
        """Call `PickingEngine.run_greedy`. Returns all tokens that it chose. All but the last have been run; their
        outcomes are kept."""
        started = time.perf_counter()
        chosen: list[int] = engine.run_greedy(token, max(1, count), banned).tolist()
        self._queue.extend(pairwise(chosen))
        self._pace = (time.perf_counter() - started) / len(chosen)
        return chosen

    def settle(self) -> int:
        """Discard the tokens that the answer will not reach, and judge the draft. Returns the number of their rows."""
        left = len(self._queue)
        if self.unsettled:
            self.judge(self.unsettled, self.unsettled - left)
        self.unsettled = 0
        self._queue.clear()
        return left

    # What to draft

    def report(self) -> Drafted | None:
        """The report of this generation; None without drafts."""
        if not self.most:
            return None
        alone = [count * (self._alone(context) or 0.0) for context, count in enumerate(self._tokens)]
        gain = sum(alone) / self._spent if self.drafted and any(alone) and self._spent else None
        by = "seconds and joules" if self.power and self.power.known else "seconds"
        return Drafted(self.drafted, self.accepted, gain, by)

    def propose(self, most: int, given: int = 1, behind: int = 0) -> IntArray:
        """The drafted tokens to verify, int32 [n], at most `most`; empty if none would pay. given: the number of known
        tokens before them in the same pass. behind: the number of rows that the pass reads."""
        self._context = bisect_right(CONTEXTS, behind)
        if (most := min(most, self.most)) <= 0:
            return np.zeros(0, np.int32)
        draft, self._match = self.drafts.draft(most), _bucket(self.drafts.match)
        length, gain = self._length(draft.size, given, self._match, 0.0)
        if draft.size:
            self._untried = self._match, int(draft[0])
        if self.model and self.drafts.text.size and self.model.follows(self.drafts.text, given):
            count, better = self._length(most, given, _MODEL, self._share)
            if count and better > gain:
                self._match = _MODEL
                return self._ask(self.model, count)
        if length:
            self._untried = None
        return draft[:length]

    def _length(self, most: int, given: int, place: int, each: float) -> tuple[int, float]:
        """The best length of a draft, and its expected tokens per time of a pass over one token. each: the cost of
        drafting a token, in such times."""
        tried = self._tried[place]
        mean = self._right[place] / tried
        chance = max(0.0, mean - CAUTION * math.sqrt(mean * (1 - mean) / tried))
        best, length, expected = LEAST_GAIN * given / self._cost(given), 0, float(given)
        for count in range(1, most + 1):
            expected += chance**count
            if (gain := expected / (self._cost(given + count) + count * each)) > best:
                best, length = gain, count
        return length, best

    @property
    def _share(self) -> float:
        """The cost of a token that the model drafts ÷ that of a pass over one token."""
        assert self.model is not None
        alone = self._alone(self._context)
        return self._watts(0) * (self._model_s / alone if self._model_s and alone else self.model.share)

    def _alone(self, context: int) -> float | None:
        """Seconds of a pass over one token, in a shorter context if none ran in this one; None if none is known."""
        return next((each[1][0] for each in self._times[context::-1] if 1 in each), None)

    def _ask(self, model: Drafter, count: int) -> IntArray:
        if self.power:
            self.power.start(0)
        started = time.perf_counter()
        found = model.draft(self.drafts.text, count)
        seconds = time.perf_counter() - started
        if self.power:
            self.power.stop(0)
        self._spent += seconds
        if model.caught_up <= _CAUGHT_UP:
            each = seconds / count
            before = self._model_s or each
            self._model_s = before + NEWEST * (min(each, OUTLIER * before) - before)
        return found

    def _watts(self, rows: int) -> float:
        """The watts of a pass ÷ those of a pass over one token, but at least 1; 0: of drafting by the model."""
        return max(1.0, self.power.ratio(rows)) if self.power else 1.0

    def _cost(self, rows: int) -> float:
        """c(rows)."""
        return 1.0 if rows == 1 else self._watts(rows) * self._slower(rows)

    def _slower(self, rows: int) -> float:
        """The seconds of a pass over `rows` > 1 tokens ÷ those of one, measured in a shorter context while they are not
        known in this one."""
        for times in self._times[self._context :: -1]:
            timed = [count for count, (_, passes) in times.items() if passes >= FEW]
            if 1 in timed and (above := min((count for count in timed if count >= rows), default=0)):
                below = max(count for count in timed if count <= rows)
                low, high = (times[count][0] / times[1][0] for count in (below, above))
                return low + (high - low) * (rows - below) / max(1, above - below)
        base, each = FIRST_COST
        return base + each * rows

    def time(self, given: int, drafted: int, seconds: float, behind: int = 0) -> None:
        """Note the seconds of a pass over `given` known and `drafted` tokens, with `behind` rows before them."""
        if self.power:
            self.power.stop(given + drafted)
        self._context = bisect_right(CONTEXTS, behind)
        times = self._times[self._context]
        self._tokens[self._context] += given
        self._spent, rows = self._spent + seconds, given + drafted
        before, passes = times.get(rows, (seconds, 0))
        mean = before + NEWEST * (min(seconds, OUTLIER * before) - before)
        times[rows] = mean if passes >= FEW else min(before, seconds), passes + 1

    def judge(self, drafted: int, accepted: int) -> None:
        """Count a verified draft of `drafted` tokens, of which the first `accepted` were right."""
        self.drafted, self.accepted = self.drafted + drafted, self.accepted + accepted
        self._tokens[self._context] += accepted
        self._learn(self._match, accepted + (accepted < drafted), accepted)  # nothing after the first wrong token

    def _learn(self, place: int, tried: int, accepted: int) -> None:
        kept = min(1.0, MEMORY / (self._tried[place] + tried))
        self._right[place] = kept * (self._right[place] + accepted)
        self._tried[place] = kept * (self._tried[place] + tried)


def _bucket(match: int) -> int:
    return min(len(FIRST_CHANCES) - 1, max(match, 1).bit_length() - 1)
