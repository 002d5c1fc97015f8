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
    """The layer's engine, whose rows are those of the newest tokens, and the states that it has not run yet.

    A row is made of a token and of the model's state before it. Rows begin with the newest `MTP_STATES` tokens of a
    prompt, run when a draft is wanted for the first time: a prompt takes no longer than without the layer, and older
    tokens matter little to the next few. A draft's own rows are forgotten, since they are made of the layer's states;
    those of the model come with the pass that verifies it.

    share: of the model's bytes of weights, by which its time is estimated until it is measured. caught_up: tokens that
    ran for the last draft.
    """

    def __init__(self, engine: MTPEngine, model: Engine, meter: EnergyMeter) -> None:
        """model: hands out its states. meter: counts the bytes that passes read."""
        self.engine, self._model, self._meter = engine, cast(StatesEngine, model), meter
        self.share, self.caught_up = engine.spec.weight_bytes / model.spec.weight_bytes, 0
        # Tokens that the model has run, with the states behind them, each of which waits for the token after it.
        self._waiting = deque[tuple[int, FloatArray]](maxlen=max(1, min(MTP_STATES, engine.kv.capacity // 2)))
        self._rows = 0  # but for those of a draft

    def clear(self) -> None:
        """The text goes on elsewhere."""
        self._waiting.clear()
        self._rows = 0

    def ran(self, tokens: IntArray) -> None:
        """The model has run these tokens, int [n]."""
        most = cast(int, self._waiting.maxlen)
        states = self._model.states(min(tokens.size, most))
        if len(self._waiting) + tokens.size > most:
            self._rows = 0  # there is a gap behind them
        if len(states) < tokens.size:
            self.clear()
        rows = (row.copy() for row in states)  # a view of one would keep all
        self._waiting.extend(zip(tokens[-len(states) :].tolist(), rows, strict=True))

    def drop(self, count: int) -> None:
        """Forget the last tokens that the model has run."""
        if count > len(self._waiting):
            self.clear()
        else:
            for _ in range(count):
                self._waiting.pop()

    def follows(self, text: IntArray, given: int) -> bool:
        """Whether only the last token of a text has not been run. given: tokens at its end that have not been."""
        return given == 1 and bool(self._waiting) and text.size > 1 and self._waiting[-1][0] == text[-2]

    def draft(self, text: IntArray, most: int) -> IntArray:
        """`most` tokens that may follow a text, int32 [n], whose last token has not been run."""
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
        """For `count` rows, if necessary behind the newer half of those that are there."""
        kv = self.engine.kv
        kv.truncate(self._rows)
        if kv.free < count:
            kept = min(kv.length, kv.capacity // 2, kv.capacity - count)
            kv.keep(np.arange(kv.length - kept, kv.length, dtype=np.int32), close_gaps=False)

    def _run(self, tokens: IntArray, states: FloatArray) -> int:
        """Run tokens behind these states, [n, hidden]. Returns the likeliest token behind the last."""
        kv, chunk = self.engine.kv, self.engine.config.chunk
        for first in range(0, tokens.size, chunk):
            part = tokens[first : first + chunk]
            self.engine.give(states[first : first + chunk])
            found, _ = self.engine.forward_top(part, 1)
            self._meter.add_bytes(self.engine.spec.weight_bytes + kv.nbytes * kv.length / kv.capacity)
        return int(found[0])

    def close(self) -> None:
        self.engine.close()
