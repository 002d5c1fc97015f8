"""Heads that keep rows of their own, done simply: the reference engine with rows hidden instead of moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import load_engine, some_tokens

from edge.backends.reference import ReferenceEngine, attention
from edge.backends.reference.functions import softmax
from edge.model.model import Model
from edge.types import AnyArray, FloatArray, IntArray

_FAR = 1 << 30  # behind every window: windows are applied here, by the positions that each head's rows have


def feed_chunks(twin: Any, chunks: Sequence[tuple[int, int]]) -> int:
    """Feed random tokens to a session and its oracle, in chunks of a size and with a promised size of the next. Returns
    the number of tokens."""
    twin.reset()
    tokens, at = some_tokens(sum(count for count, _ in chunks), len(chunks)), 0
    for count, upcoming in chunks:
        twin.feed(tokens[at : at + count], upcoming)
        at += count
    return at


class HeadOracle:
    """Every row that ever ran stays; `kept` says which ones a head sees, [heads, rows], of layers whose rows a policy
    chooses (`layers`): where some have windows, these are the others. All rows stay in layers with windows. Layers that
    read the rows of an earlier one (`_sources`) see what it keeps, and pay attention there.

    votes: attention counts the queries that pay a row more than average. positions, attention, seen (the number of
    observed queries that could see a row): in the same shape.
    """

    def __init__(self, model: Model, capacity: int, chunk: int) -> None:
        engine = load_engine(model, "reference", "f32", capacity=capacity, chunk=chunk, logits_rows=chunk)
        assert isinstance(engine, ReferenceEngine)
        self.engine, self.spec = engine, engine.spec
        self._windows = engine.network.windows
        sources = (core and core.rows_of for core in engine.network.attention)
        self._sources = [layer if source is None else source for layer, source in enumerate(sources)]
        whole = [layer for layer, window in enumerate(self._windows) if not window and self._sources[layer] == layer]
        self.layers = whole or list(range(self.spec.layers))
        self._all_positions = np.zeros(capacity, np.int64)  # of layers with windows
        shape = (len(self.layers) * self.spec.kv_heads, capacity)
        self.kept, self.positions = np.zeros(shape, bool), np.zeros(shape, np.int64)
        self.attention, self.seen = np.zeros(shape), np.zeros(shape, np.int64)
        self._layer = self._observed = 0
        self.votes = False

    def reset(self) -> None:
        self.engine.kv.truncate(0)
        for array in (self.kept, self.positions, self.attention, self.seen):
            array[:] = 0

    @property
    def lengths(self) -> IntArray:
        return self.kept.sum(axis=1)

    @property
    def next_position(self) -> int:
        return self.engine.kv.next_position

    def forward_all(self, tokens: IntArray, observed: int = 0) -> FloatArray:
        """Logits after every token; the last `observed` of every chunk are observed."""
        chunk = self.engine.config.chunk
        return np.concatenate([self._run(tokens[at : at + chunk], observed) for at in range(0, tokens.size, chunk)])

    def _run(self, tokens: IntArray, observed: int) -> FloatArray:
        kv, count = self.engine.kv, tokens.size
        first = kv.length
        kv._positions[:first] = _FAR
        self.kept[:, first : first + count] = True
        self._all_positions[first : first + count] = kv.next_position + np.arange(count)
        self.positions[:, first : first + count] = kv.next_position + np.arange(count)
        self._layer, self._observed = 0, min(observed, count)
        for query in range(first + count - self._observed, first + count):
            self.seen[:, : query + 1] += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "softmax", self._softmax)
            return self.engine.forward_all(tokens)

    def _softmax(self, scores: FloatArray) -> FloatArray:
        """Scores [KV heads, group, n, rows] of the next layer."""
        layer, count, rows = self._sources[self._layer], *scores.shape[-2:]
        self._layer += 1
        if layer not in self.layers:
            positions = self._all_positions[:rows]
            hidden = positions <= positions[-count:, None] - self._windows[layer]
            return softmax(np.where(hidden, np.float32(-np.inf), scores))
        index = self.layers.index(layer)
        heads = slice(index * len(scores), (index + 1) * len(scores))
        hidden = ~self.kept[heads, None, None, :rows]
        if window := self._windows[layer]:
            positions = self.positions[heads, :rows]
            hidden = hidden | (positions[:, None, None, :] <= positions[:, None, -count:, None] - window)
        shares = softmax(np.where(hidden, np.float32(-np.inf), scores))
        if self._observed:
            last = shares[:, :, -self._observed :]
            if self.votes:
                seen = self.kept[heads, :rows].cumsum(axis=1)[:, None, rows - self._observed :, None]
                last = last > 1 / seen
            self.attention[heads, :rows] += last.mean(axis=1).sum(axis=1)
        return shares

    def keep_heads(self, rows: list[IntArray]) -> None:
        for head, own in enumerate(rows):
            staying = np.flatnonzero(self.kept[head])[own]
            self.kept[head] = False
            self.kept[head, staying] = True

    def renumber(self) -> None:
        """Rotate the keys of every head to consecutive positions, the newest of all heads the same."""
        kv, longest = self.engine.kv, int(self.lengths.max())
        for head, length in enumerate(self.lengths):
            index, kv_head = divmod(head, self.spec.kv_heads)
            layer = self.layers[index]
            rows, wanted = np.flatnonzero(self.kept[head]), np.arange(longest - length, longest)
            rotation = self.engine.kv.rope.rotation
            old = self.positions[head, rows]
            kv.keys[layer][kv_head, rows] = rotation.rotate_cached(kv.keys[layer][kv_head, rows], wanted - old, layer)
            self.attention[head, rows] *= (longest - wanted) / (kv.next_position - old)
            self.positions[head, rows] = wanted
        by = longest - kv.next_position
        for layer in range(self.spec.layers):
            if layer not in self.layers and self._sources[layer] == layer:  # the distances to the next token stay
                keys = kv.keys[layer][:, : kv.length]
                keys[:] = kv.rope.rotation.rotate_cached(keys, np.full(kv.length, by), layer)
        self._all_positions += by
        kv.next_position = longest

    def rows_of(self, values: AnyArray, behind: int = 0) -> AnyArray:
        """The values of the rows that heads see, [layers, KV heads, length], `behind` a head's last."""
        out = np.full((len(values), self.lengths.max()), behind, values.dtype)
        for head, length in enumerate(self.lengths):
            out[head, :length] = values[head, self.kept[head]]
        return out.reshape(len(self.layers), self.spec.kv_heads, -1)
