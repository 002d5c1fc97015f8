"""Gemma 4's assistant, a file beside the model, which drafts from the model's states and the rows of its cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from edge.backends.base import Engine, SharedRows, SharingEngine
from edge.backends.reference.assistant import Assistant, step_bytes
from edge.backends.token_table import TokenTable
from edge.model.assistant import source_layers
from edge.model.model import Model
from edge.model.tensors import find_network
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.drafter import Drafter, States
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.model.draft import DraftFile


class AssistantDrafter(Drafter):
    """The assistant's weights. It keeps no rows, and reads a copy of the model's for each draft."""

    def __init__(self, draft: DraftFile, model: Model, meter: EnergyMeter, most: int) -> None:
        """most: tokens of a pass that may be dropped again, and the one before. meter: counts the bytes that it
        reads."""
        self._assistant, self._meter, self._states = Assistant(draft.file, draft.spec), meter, States(1 + most)
        network = find_network(model.spec)
        self._layers, self._scale = source_layers(network), np.float32(network.embedding_scale)
        self._embeddings = TokenTable(model.file, "token_embd.weight")
        self._step_bytes, self.caught_up = step_bytes(draft.spec), 0
        self.share = self._step_bytes / model.spec.weight_bytes
        self._engine: SharingEngine | None = None

    def bind(self, engine: Engine) -> None:
        self._engine = cast(SharingEngine, engine)

    def release(self) -> None:
        self._engine = None
        self.reset()

    def reset(self) -> None:
        self._states.waiting.clear()

    def ran(self, tokens: IntArray) -> None:
        assert self._engine is not None
        self._states.add(self._engine.states, tokens)

    def drop(self, count: int) -> None:
        self._states.drop(count)

    def follows(self, text: IntArray, given: int) -> bool:
        return self._states.lead_to(text, given)

    def draft(self, text: IntArray, most: int) -> IntArray:
        rows = self._rows()
        if rows is None:
            return np.zeros(0, np.int32)
        token, state, drafted = int(text[-1]), self._states.waiting[-1][1], list[int]()
        while len(drafted) < most:
            token, state = self._assistant.step(self._embedding(token), state, rows)
            drafted.append(token)
        read = sum(head.nbytes for each in rows.values() for head in (*each.keys, *each.values)) / 2  # float16, usually
        self._meter.add_bytes(most * self._step_bytes + read)
        return np.array(drafted, np.int32)

    def _rows(self) -> dict[bool, SharedRows] | None:
        """The rows that layers without and with a window read; None if heads keep different ones."""
        assert self._engine is not None
        found = {window: self._engine.rows(layer) for window, layer in self._layers.items()}
        rows = {window: each for window, each in found.items() if each is not None}
        return rows if len(rows) == len(found) else None

    def _embedding(self, token: int) -> FloatArray:
        ((_, rows),) = self._embeddings.read(np.array([token], np.int32))
        return np.asarray(rows[0] * self._scale)

    def close(self) -> None:
        self._embeddings.close()
        self._assistant.close()
