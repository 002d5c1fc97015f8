"""The next token of an answer: drawn from all logits or from the likeliest few, or chosen by the engine."""

from __future__ import annotations

import time
from typing import cast

import numpy as np

from edge.backends.base import PickingEngine
from edge.run.context import Context
from edge.run.eviction import unobserved
from edge.run.sampler import Sampler
from edge.types import FloatArray, IntArray

MOST_AHEAD = 256  # tokens that an engine is asked to choose at once
_BURST_S = 0.05  # of tokens at once: text still flows, and budgets and callers are heard as soon
_IN_VAIN = 4  # one token in this many may be run behind the end of the answer


class Picker:
    """The same tokens, whichever way they come. logits: after the last token of the prompt."""

    def __init__(self, context: Context, sample: Sampler, logits: FloatArray) -> None:
        self.sample = sample
        self._context = context
        self._logits, self._top = logits, cast(tuple[IntArray, FloatArray] | None, None)
        self._chosen: int | None = None
        self._pace = _BURST_S  # seconds per token that the engine chose
        self.ran = 1  # tokens that were run by the last call of `run` that ran any

    def next(self) -> int:
        """Raises EngineError if the model produced NaN."""
        if self._chosen is not None:
            return self._chosen
        return self.sample(self._logits) if self._top is None else self.sample.draw_from(*self._top)

    def run(self, tokens: list[int], generated: int, most: int) -> None:
        """Run tokens for which there is room, the last of which `next` returned, or which follow it.

        generated: tokens of the answer so far. most: those that the engine may choose; 0 if more tokens are to be run.
        """
        context, engine = self._context, self._context.engine
        if context.ahead:
            self._chosen = context.ahead.popleft()
            return
        self._chosen = self._top = None
        self.ran = len(tokens)
        if most and self._may_choose(cast(PickingEngine, engine)):
            count = min(most, unobserved(context.policy.needs, engine.kv.free), 1 + generated // _IN_VAIN)
            started = time.perf_counter()
            self._chosen = context.run_greedy(
                tokens[0], max(1, min(count, int(_BURST_S / self._pace))), self.sample.banned
            )
            self.ran = 1 + len(context.ahead)
            self._pace = (time.perf_counter() - started) / self.ran
        elif engine.capabilities.picks and 0 < self.sample.candidates <= cast(PickingEngine, engine).most_candidates:
            self._top = context.forward_top(np.array(tokens, np.int32), self.sample.candidates)
        else:
            self._logits = context.forward(np.array(tokens, np.int32), upcoming=1)

    def _may_choose(self, engine: PickingEngine) -> bool:
        return self.sample.greedy and self.sample.banned.size <= engine.most_banned
