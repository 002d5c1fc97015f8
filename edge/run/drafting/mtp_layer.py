"""A model's own layer for multi-token prediction, which drafts its next tokens from its hidden states."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from edge.backends.base import Engine, EngineConfig
from edge.backends.drafting import MTPEngine, StatesEngine
from edge.formats.gguf import GGUFFile
from edge.plan.resolved import MTP_STATES
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.drafter import Drafter, States
from edge.types import FloatArray, IntArray


class MTPLayer(Drafter):
    """The layer's engine, which holds rows of the newest tokens, and the states that it has not run yet.

    A row is computed from a token and the model's state before it. Rows begin with the newest `MTP_STATES` tokens of a
    prompt, which run with the first draft: a prompt takes no longer than without the layer, and older tokens matter
    little to the next few. A draft's own rows are dropped, since they are computed from the layer's states; the pass
    that verifies the draft supplies the model's.
    """

    engine: MTPEngine

    def __init__(self, file: GGUFFile, config: EngineConfig, meter: EnergyMeter) -> None:
        """file: the result of `mtp_file`. config: of the layer. meter: counts the bytes that passes read."""
        self._file, self._config, self._meter = file, config, meter
        self.caught_up = 0

    def bind(self, engine: Engine) -> None:
        """Load the layer, which shares weights of the engine. Reports no progress: it is a small part of the model."""
        model = cast(StatesEngine, engine)
        self.engine = model.open_mtp(self._file, self._config)
        self.follow(engine, model.states)

    def follow(self, engine: Engine, read: Callable[[int], FloatArray]) -> None:
        """Draft for an engine, whose states `read` returns (`States.add`)."""
        self.share = self.engine.spec.weight_bytes / engine.spec.weight_bytes
        # Each state waits for the next token.
        self._read, self._states = read, States(min(MTP_STATES, self.engine.kv.capacity // 2))
        self._rows = 0  # excluding those of a draft

    def release(self) -> None:
        self.engine.close()

    def reset(self) -> None:
        self._states.waiting.clear()
        self._rows = 0

    def ran(self, tokens: IntArray) -> None:
        if not self._states.add(self._read, tokens):
            self._rows = 0  # there is a gap after them

    def drop(self, count: int) -> None:
        if not self._states.drop(count):
            self.reset()

    def follows(self, text: IntArray, given: int) -> bool:
        return self._states.lead_to(text, given)

    def draft(self, text: IntArray, most: int) -> IntArray:
        waiting = self._states.waiting
        known, states = zip(*waiting, strict=True)
        tokens = np.array([*known[1:], text[-1]], np.int32)
        waiting.clear()
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
            found = self.run_chunk(part, states[first : first + chunk])
            self._meter.add_bytes(self.engine.spec.weight_bytes + kv.nbytes * kv.length / kv.capacity)
        return found

    def run_chunk(self, tokens: IntArray, states: FloatArray) -> int:
        """As `_run`, for at most a chunk."""
        self.engine.give(states)
        return int(self.engine.forward_top(tokens, 1)[0][0])
