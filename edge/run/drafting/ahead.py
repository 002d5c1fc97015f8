"""Tokens that run ahead of an answer: those that the engine chooses itself, and drafts that a pass verifies."""

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

IN_VAIN = 4  # of tokens that the engine chooses, one in so many may be run behind the end of the answer
BURST_S = 0.05  # of tokens at once: text still flows, and budgets and callers are heard as soon

Outcome = FloatArray | tuple[IntArray, FloatArray] | int  # all logits, those of the likeliest, or the engine's choice


class Ahead:
    """Tokens behind the pending ones of a sequence that have been run, with the outcomes of their passes. Their rows
    are the last ones of the cache.

    speculation: chooses drafts and judges them; None: there are none.
    """

    def __init__(self, drafts: int, model: DraftModel | MTPLayer | None) -> None:
        """drafts: tokens that are verified at once; 0: none. model: drafts them where no text is copied."""
        self.speculation = Speculation(drafts, model) if drafts else None
        self.clear()

    def clear(self) -> None:
        """Forget what was run, with the conversation that it followed."""
        self._queue = deque[tuple[int, Outcome]]()
        self.drafted = 0  # of the queue when it was run, if these tokens are not the engine's own choice
        self._pace = BURST_S  # seconds per token that the engine chose

    def begin(self) -> None:
        """Another generation begins."""
        self._pace = BURST_S
        if self.speculation:
            self.speculation.begin()

    def forget_texts(self) -> None:
        """Forget all texts from which drafts are copied."""
        if self.speculation:
            self.speculation.drafts.clear()

    def restart(self, text: IntArray) -> None:
        """The text begins with these tokens."""
        if self.speculation:
            self.speculation.restart(text)

    def note(self, tokens: IntArray) -> None:
        """The text goes on with these tokens."""
        if self.speculation:
            self.speculation.note(tokens)

    def drop(self, count: int) -> None:
        """The last `count` tokens of the text will be noted again."""
        if self.speculation:
            self.speculation.drafts.drop(count)

    def begins_with(self, tokens: list[int]) -> bool:
        return [token for token, _ in islice(self._queue, len(tokens))] == tokens

    def take(self, token: int) -> Outcome | None:
        """The outcome of the pass over this token, if it was run next; the answer has come to it."""
        if not self._queue or self._queue[0][0] != token:
            return None
        return self._queue.popleft()[1]

    def burst(self, answered: int) -> int:
        """Tokens that the engine chooses at once, at most, in an answer that has `answered` tokens."""
        return min(1 + answered // IN_VAIN, int(BURST_S / self._pace))

    def verify(self, engine: VerifyingEngine, tokens: IntArray, draft: IntArray) -> tuple[int, int, FloatArray]:
        """Run pending tokens and the draft that follows them, and keep what was run of the draft.

        Returns how many tokens have been run, how many pending ones of them, and the logits after the last of those.
        """
        found = engine.verify(np.concatenate([tokens, draft]) if draft.size else tokens)
        pending = min(tokens.size, len(found))
        outcome, *others = list[FloatArray](found[pending - 1 :])
        self.drafted = len(others)
        self._queue.extend(zip(draft.tolist(), others, strict=False))
        return len(found), pending, outcome

    def choose(self, engine: PickingEngine, token: int, count: int, banned: IntArray) -> list[int]:
        """`PickingEngine.run_greedy`. Returns all tokens that it chose, of which the last has not been run; those
        before it are kept."""
        started = time.perf_counter()
        chosen: list[int] = engine.run_greedy(token, max(1, count), banned).tolist()
        self._queue.extend(pairwise(chosen))
        self._pace = (time.perf_counter() - started) / len(chosen)
        return chosen

    def time(self, given: int, seconds: float, behind: int) -> None:
        """A pass over `given` pending tokens and those that were drafted took this long, behind rows that it read."""
        if self.speculation:
            self.speculation.time(given, self.drafted, seconds, behind)

    def settle(self) -> int:
        """The answer will not come to what is left. Returns how many rows that is."""
        left = len(self._queue)
        if self.speculation and self.drafted:
            self.speculation.judge(self.drafted, self.drafted - left)
        self.drafted = 0
        self._queue.clear()
        return left
