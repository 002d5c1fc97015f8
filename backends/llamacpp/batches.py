"""Batches of llama.cpp: token ids or given rows, at positions of one or of four numbers, causal or not.

A batch holds one kind only, so a pass with pictures is several batches: texts, and rows between them. Spans that see
all of themselves are batches of their own, which run without the causal mask: they then see all rows of the cache and
each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from edge.backends.llamacpp.kv import SEQUENCE
from edge.model.parts.given import GivenRows
from edge.model.parts.places import Places
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

_COMPONENTS = 4  # of positions of given rows: time, height, width, and one that is 0
_SEVERAL = (8, 40)  # LLAMA_ROPE_TYPE_MROPE and IMROPE, whose positions have all four


@dataclass(frozen=True)
class Run:
    """Tokens of one batch. rows: in their place, float32 [n, width]; None: ids of the vocabulary. positions: int32 [n]
    or [n, components]. whole: they see all of each other."""

    part: slice
    tokens: IntArray
    positions: IntArray
    rows: FloatArray | None = None
    whole: bool = False

    @property
    def numbers(self) -> IntArray:
        """llama.cpp's position of each row, int32 [n]: of several components, the time."""
        return self.positions if self.positions.ndim == 1 else self.positions[:, 0]


def runs_of(tokens: IntArray, position: int, given: GivenRows | None, places: Places | None) -> Iterator[Run]:
    """The batches of a pass, whose first token stands at `position` unless it has `places`."""
    count = tokens.size
    positions = places.positions if places else np.arange(position, position + count, dtype=np.int32)
    sees = places.sees if places else np.arange(count)
    spans = np.where(np.bincount(sees, minlength=count)[sees] > 1, sees, -1)  # by their ends
    beyond = tokens >= given.vocab if given else np.zeros(count, bool)
    changes = 1 + np.flatnonzero((beyond[1:] != beyond[:-1]) | (spans[1:] != spans[:-1]))
    for start, stop in pairwise([0, *changes.tolist(), count]):
        part = slice(start, stop)
        rows = np.concatenate([*given.parts(tokens[part])], axis=1) if given and beyond[start] else None
        yield Run(part, tokens[part], positions[part], rows, bool(spans[start] >= 0))


class Batches:
    """The C arrays of batches of at most `size` tokens."""

    def __init__(self, lib: Any, model: Any, size: int) -> None:
        self._lib, self._several = lib, lib.llama_model_rope_type(model) in _SEVERAL
        self._batch = lib.llama_batch_init(size, 0, 1)
        for index in range(size):
            self._batch.n_seq_id[index] = 1
            self._batch.seq_id[index][0] = SEQUENCE
        view = np.ctypeslib.as_array
        self._tokens, self._wanted = view(self._batch.token, (size,)), view(self._batch.logits, (size,))
        self._positions = view(self._batch.pos, (size,))
        self._given: list[AnyArray] = []  # what the last batch of given rows points to

    def fill(self, run: Run, *, every: bool) -> Any:
        """A llama_batch, valid until the next call. every: logits of all tokens, not only of the last."""
        count = run.tokens.size
        self._wanted[:count] = every
        self._wanted[count - 1] = True
        if run.rows is None:
            self._tokens[:count], self._positions[:count] = run.tokens, run.numbers
            self._batch.n_tokens = count
            return self._batch
        batch, rows = type(self._batch).from_buffer_copy(self._batch), np.ascontiguousarray(run.rows, np.float32)
        batch.n_tokens, batch.token = count, None
        batch.embd = rows.ctypes.data_as(type(batch.embd))
        positions = np.zeros((_COMPONENTS if self._several else 1, count), np.int32)
        positions[:3] = run.positions.T
        batch.pos = positions.ctypes.data_as(type(batch.pos))
        self._given = [rows, positions]
        return batch

    def close(self) -> None:
        self._lib.llama_batch_free(self._batch)
