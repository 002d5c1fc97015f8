"""Gemma 4's assistant, a file beside the model, which drafts from the model's states and the rows of its cache.

Its layers run by kernels, over rows that stay where they are; what is around them, and the head, in NumPy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from edge.backends.base import Engine, EngineConfig
from edge.backends.drafting import AssistingLayers, SharingEngine
from edge.backends.reference.assistant import Assistant, step_bytes
from edge.backends.token_table import TokenTable
from edge.model.drafters.assistant import source_layers
from edge.model.model import Model
from edge.model.tensors import find_network
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.drafter import Drafter, States
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.model.drafters.draft import DraftFile


class AssistantDrafter(Drafter):
    """The assistant's weights. It keeps no rows."""

    def __init__(self, draft: DraftFile, model: Model, config: EngineConfig, meter: EnergyMeter, most: int) -> None:
        """config: of its layers. most: tokens of a pass that may be dropped again, and the one before. meter: counts
        the bytes that it reads."""
        self._assistant = Assistant(draft.file, draft.spec, layers=False)
        self._meter, self._states, self._config = meter, States(1 + most), config
        network = find_network(model.spec)
        self._file, self._spec = draft.layers_for(model.spec)
        self._scale, sources = np.float32(network.embedding_scale), source_layers(network)
        self._values = {layer: (network.row_values[layer], network.windows[layer]) for layer in sources.values()}
        self._embeddings = TokenTable(model.file, "token_embd.weight")
        self._step_bytes, self.caught_up = step_bytes(draft.spec), 0
        self.share = self._step_bytes / model.spec.weight_bytes
        self._engine: SharingEngine | None = None
        self._layers: AssistingLayers | None = None

    def bind(self, engine: Engine) -> None:
        self._engine = cast(SharingEngine, engine)
        self._layers = self._engine.open_assistant(self._file, self._spec, self._config)

    def release(self) -> None:
        if self._layers:
            self._layers.close()
        self._engine = self._layers = None
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
        assert self._layers is not None
        assert self._engine is not None
        token, state, drafted = int(text[-1]), self._states.waiting[-1][1], list[int]()
        while len(drafted) < most:
            normed = self._layers.run(self._assistant.start(self._embedding(token), state))
            if normed is None:
                break
            token, state = self._assistant.finish(normed)
            drafted.append(token)
        rows = self._engine.kv.length
        read = sum(2 * values * min(rows, window or rows) for values, window in self._values.values())  # in float16
        self._meter.add_bytes(len(drafted) * (self._step_bytes + read))
        return np.array(drafted, np.int32)

    def _embedding(self, token: int) -> FloatArray:
        ((_, rows),) = self._embeddings.read(np.array([token], np.int32))
        return np.asarray(rows[0] * self._scale)

    def close(self) -> None:
        self._embeddings.close()
        self._assistant.close()
