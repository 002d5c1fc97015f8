"""An EAGLE-3 head, a file beside the model, which drafts from hidden states that enter some of the model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from edge.backends.base import Engine
from edge.backends.drafting import MTPEngine, StatesEngine
from edge.backends.token_table import TokenTable
from edge.model.drafters.eagle import EMBEDDING, norm_of_features, tokens_of
from edge.model.model import Model
from edge.run.budgets.meters import EnergyMeter
from edge.run.drafting.mtp_layer import MTPLayer
from edge.types import FloatArray, IntArray

if TYPE_CHECKING:
    from edge.model.drafters.draft import DraftFile


class EagleHead(MTPLayer):
    """The head's engine, with rows as a layer for multi-token prediction has them. The first token of a draft is
    computed from the model's features, the others from the head's own states."""

    def __init__(self, draft: DraftFile, model: Model, engine: Engine, meter: EnergyMeter) -> None:
        """engine: of the head. meter: counts the bytes that passes read."""
        self.engine, self._meter, self.caught_up = cast(MTPEngine, engine), meter, 0
        self._tokens, self._norm = tokens_of(draft.whole, model.spec.vocab), norm_of_features(draft.whole)
        own = EMBEDDING in draft.whole.tensors
        self._embeddings = TokenTable(draft.whole if own else model.file, EMBEDDING)

    def bind(self, engine: Engine) -> None:
        self.follow(engine, cast(StatesEngine, engine).layer_states)

    def release(self) -> None:
        self.reset()

    def run_chunk(self, tokens: IntArray, states: FloatArray) -> int:
        if self._norm is not None and states.shape[1] == self._norm.size:
            scale = np.sqrt(np.square(states).mean(axis=1, keepdims=True) + np.float32(self.engine.spec.norm_eps))
            states = states / scale * self._norm
        self.engine.give(states, np.concatenate([rows for _, rows in self._embeddings.read(tokens)]))
        row = int(self.engine.forward_top(np.zeros_like(tokens), 1)[0][0])
        return row if self._tokens is None else int(self._tokens[row])

    def close(self) -> None:
        self._embeddings.close()
        self.engine.close()
