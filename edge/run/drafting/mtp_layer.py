"""A model's own layer for multi-token prediction, which drafts its next tokens from its hidden states."""

from __future__ import annotations

from collections import deque
from typing import cast

import numpy as np

from edge.backends.base import Engine, MTPEngine, StatesEngine
from edge.plan.resolved import MTP_STATES
from edge.run.budgets.meters import EnergyMeter
from edge.types import FloatArray, IntArray


class MTPLayer:
    """The layer's engine, which holds rows of the newest tokens, and the states that it has not run yet.

    A row is computed from a token and the model's state before it. Rows begin with the newest `MTP_STATES` tokens of a
    prompt, which run with the first draft: a prompt takes no longer than without the layer, and older tokens matter
    little to the next few. A draft's own rows are dropped, since they are computed from the layer's states; the pass
    that verifies the draft supplies the model's.

    share: its weights in bytes ÷ the model's, which estimates its time until it is measured. caught_up: tokens that ran
    for the last draft.
    """

    def __init__(self, engine: MTPEngine, model: Engine, meter: EnergyMeter) -> None:
        """model: hands out its states. meter: counts the bytes that passes read."""
        self.engine, self._model, self._meter = engine, cast(StatesEngine, model), meter
        self.share, self.caught_up = engine.spec.weight_bytes / model.spec.weight_bytes, 0
        # Tokens that the model has run, with the states after them, each of which waits for the next token.
        self._waiting = deque[tuple[int, FloatArray]](maxlen=max(1, min(MTP_STATES, engine.kv.capacity // 2)))
        self._rows = 0  # excluding those of a draft

    def clear(self) -> None:
        """Forget all rows and states: the next tokens do not follow."""
        self._waiting.clear()
        self._rows = 0

    def ran(self, tokens: IntArray) -> None:
        """Take the states of the tokens, int [n], that the model has just run."""
        most = cast(int, self._waiting.maxlen)
        states = self._model.states(min(tokens.size, most))
        if len(self._waiting) + tokens.size > most:
            self._rows = 0  # there is a gap after them
        if len(states) < tokens.size:
            self.clear()
        rows = (row.copy() for row in states)  # a view would keep the whole array alive
        self._waiting.extend(zip(tokens[-len(states) :].tolist(), rows, strict=True))

    def drop(self, count: int) -> None:
        """Drop the last `count` tokens that the model has run."""
        if count > len(self._waiting):
            self.clear()
        else:
            for _ in range(count):
                self._waiting.pop()

    def follows(self, text: IntArray, given: int) -> bool:
        """Whether it can draft: only the last token of the text has not been run. given: tokens not run."""
        return given == 1 and bool(self._waiting) and text.size > 1 and self._waiting[-1][0] == text[-2]

    def draft(self, text: IntArray, most: int) -> IntArray:
        """Draft at most `most` tokens that may follow a text whose last token has not been run, int32 [n]."""
        known, states = zip(*self._waiting, strict=True)
        tokens = np.array([*known[1:], text[-1]], np.int32)
        self._waiting.clear()
        most = min(most, self.engine.kv.capacity // 2)
        self._make_room(tokens.size + most)
        token, self.caught_up = self._run(tokens, np.stack(states)), tokens.size
        self._rows, drafted = self.engine.kv.length, [token]
        while len(drafted) < most:
            token = self._run(np.array([token], np.int32), self.engine.states(1))
            drafted.append(token)
        return np.array(drafted, np.int32)

    def _make_room(self, count: int) -> None:
        """Make room for `count` rows; if necessary, keep only the newer rows, up to half of the cache."""
        kv = self.engine.kv
        kv.truncate(self._rows)
        if kv.free < count:
            kept = min(kv.length, kv.capacity // 2, kv.capacity - count)
            kv.keep(np.arange(kv.length - kept, kv.length, dtype=np.int32), close_gaps=False)

    def _run(self, tokens: IntArray, states: FloatArray) -> int:
        """Run tokens with the states before them, [n, hidden]. Returns the likeliest token after the last."""
        kv, chunk = self.engine.kv, self.engine.config.chunk
        for first in range(0, tokens.size, chunk):
            part = tokens[first : first + chunk]
            self.engine.give(states[first : first + chunk])
            found, _ = self.engine.forward_top(part, 1)
            self._meter.add_bytes(self.engine.spec.weight_bytes + kv.nbytes * kv.length / kv.capacity)
        return int(found[0])

    def close(self) -> None:
        self.engine.close()
