"""A small model that drafts the next tokens of a larger one, greedily."""

from __future__ import annotations

import numpy as np

from edge.backends.base import Engine
from edge.backends.kv_cache import RewindError
from edge.prompt_cache.tree import agreement
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.drafter import Drafter
from edge.types import FloatArray, IntArray

SINKS = 4  # first tokens kept of a text that is longer than the cache


class DraftModel(Drafter):
    """An engine with a cache of its own, which holds rows of the last text and its draft. Sequences share it."""

    def __init__(self, engine: Engine, meter: EnergyMeter) -> None:
        """meter: counts the bytes that passes read."""
        self.engine, self._meter = engine, meter
        self._ran, self.caught_up = np.zeros(0, np.int32), 0  # tokens of the rows

    def bind(self, engine: Engine) -> None:
        self.share = self.engine.spec.weight_bytes / engine.spec.weight_bytes

    def draft(self, text: IntArray, most: int) -> IntArray:
        """Draft `most` tokens. Tokens of the text without a row run first."""
        text, kv, drafted = self._fitting(text, most), self.engine.kv, list[int]()
        same = min(agreement(self._ran, text), text.size - 1)
        if same < kv.length:
            try:
                kv.truncate(same)
            except RewindError:  # sliding windows have moved on
                kv.truncate(same := 0)
        logits, self.caught_up = self._run(text[same:]), text.size - same
        while True:
            drafted.append(int(logits.argmax()))
            if len(drafted) == most:
                break
            logits = self._run(np.array(drafted[-1:], np.int32))
        found = np.array(drafted, np.int32)
        self._ran = np.concatenate([text, found[:-1]])
        return found

    def _fitting(self, text: IntArray, most: int) -> IntArray:
        """The text, or its sinks and an end that fits. The end begins at the same token for many drafts, so that rows
        can be reused."""
        room = self.engine.kv.capacity - most
        if text.size <= room:
            return text
        step = max(1, room // 2)
        dropped = -(-(text.size - room) // step) * step
        return np.concatenate([text[:SINKS], text[SINKS + dropped :]])

    def _run(self, tokens: IntArray) -> FloatArray:
        kv = self.engine.kv
        logits = self.engine.forward(tokens)
        self._meter.add_bytes(self.engine.spec.weight_bytes + kv.nbytes * kv.length / kv.capacity)
        return logits

    def close(self) -> None:
        self.engine.close()
