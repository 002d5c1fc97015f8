"""Tokens that run ahead of an answer: the engine's own choices, and drafts that a pass verifies."""

from __future__ import annotations

import time
from collections import deque
from itertools import islice, pairwise
from typing import TYPE_CHECKING

import numpy as np

from edge.backends.base import PickingEngine, VerifyingEngine
from edge.run.drafting.draft_model import DraftModel
from edge.run.drafting.speculation import Speculation
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.run.drafting.mtp_layer import MTPLayer

IN_VAIN = 4  # one in four of the tokens that the engine chooses may be wasted after the end of the answer
BURST_S = 0.05  # the longest burst: text still flows, and budgets and callers are checked in time

Outcome = FloatArray | tuple[IntArray, FloatArray] | int  # all logits, those of the likeliest, or the engine's choice


class Ahead:
    """Tokens after a sequence's pending ones that have already been run, with the outcomes of their passes. Their rows
    are the last ones of the cache.

    speculation: chooses drafts and judges them; None: there are no drafts.
    """

    def __init__(self, drafts: int, model: DraftModel | MTPLayer | None, vocab: int) -> None:
        """drafts: most drafted tokens verified in a pass; 0: none. model: drafts where no text is copied. vocab: ids
        from here on are no tokens of a text."""
        self._vocab = vocab
        self.speculation = Speculation(drafts, model) if drafts else None
        self.clear()

    def clear(self) -> None:
        """Forget the tokens run ahead, along with their conversation."""
        self._queue = deque[tuple[int, Outcome]]()
        self.drafted = 0  # tokens of the queue when it was run, if drafted rather than chosen by the engine
        self._pace = BURST_S  # seconds per token that the engine chose

    def begin(self) -> None:
        """Begin another generation."""
        self._pace = BURST_S
        if self.speculation:
            self.speculation.begin()

    def forget_texts(self) -> None:
        """Forget all texts from which drafts are copied."""
        if self.speculation:
            self.speculation.drafts.clear()

    def restart(self, text: IntArray) -> None:
        """Begin a text with these tokens, int32 [n]."""
        if self.speculation:
            self.speculation.restart(text[text < self._vocab])

    def note(self, tokens: IntArray) -> None:
        """Continue the text with these tokens, int32 [n]."""
        if self.speculation:
            self.speculation.note(tokens[tokens < self._vocab])

    def drop(self, count: int) -> None:
        """Drop the last `count` tokens of the text, which will be noted again."""
        if self.speculation:
            self.speculation.drafts.drop(count)

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
        self.drafted = len(others)
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

    def time(self, given: int, seconds: float, behind: int) -> None:
        """Note the seconds of a pass over `given` pending tokens and the draft, with `behind` rows before them."""
        if self.speculation:
            self.speculation.time(given, self.drafted, seconds, behind)

    def settle(self) -> int:
        """Discard the tokens that the answer will not reach, and judge the draft. Returns the number of their rows."""
        left = len(self._queue)
        if self.speculation and self.drafted:
            self.speculation.judge(self.drafted, self.drafted - left)
        self.drafted = 0
        self._queue.clear()
        return left
