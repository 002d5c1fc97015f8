"""Heads that keep rows of their own, done simply: the reference engine with rows hidden instead of moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from conftest import load_engine, some_tokens

from edge.backends.llamacpp.engine import LlamaCppEngine
from edge.backends.reference import attention
from edge.backends.reference.functions import softmax
from edge.kv import KVView, make_policy
from edge.model.model import Model
from edge.run.session import Session
from edge.types import AnyArray, FloatArray, IntArray

EXACT = 1e-3  # largest error of a logit; their standard deviation is 3
_FAR = 1 << 30  # behind every window: windows are applied here, by the positions that each head's rows have


class HeadOracle:
    """Every row that ever ran stays; `kept` says which ones a head sees, [heads, rows], of layers whose rows a policy
    chooses (`layers`): where some have windows, these are the others. All rows stay in layers with windows. Layers that
    read the rows of an earlier one (`_sources`) see what it keeps, and pay attention there.

    votes: attention counts the queries that pay a row more than average. positions, attention, seen (the number of
    observed queries that could see a row): in the same shape. together: heads keep the same rows, as llama.cpp's do.
    """

    def __init__(self, model: Model, capacity: int, chunk: int, *, together: bool = False) -> None:
        engine = load_engine(model, "reference", "f32", capacity=capacity, chunk=chunk, logits_rows=chunk)
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
        self.votes, self.together = False, together

    def reset(self) -> None:
        self.engine.kv.truncate(0)
        for array in (self.kept, self.positions, self.attention, self.seen):
            array[:] = 0

    @property
    def lengths(self) -> IntArray:
        return self.kept.sum(axis=1)[: 1 if self.together else None]

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
        for head, own in enumerate(rows * len(self.kept) if self.together else rows):
            staying = np.flatnonzero(self.kept[head])[own]
            self.kept[head] = False
            self.kept[head, staying] = True

    def truncate(self, length: int) -> None:
        """Of heads that keep the same rows."""
        if length == 0:
            self.reset()
            return
        self.keep_heads([np.arange(length, dtype=np.int32)])
        self.engine.kv.next_position = int(self.rows_of(self.positions).max()) + 1

    def renumber(self) -> None:
        """Rotate the keys of every head to consecutive positions, the newest of all heads the same."""
        kv, longest = self.engine.kv, int(self.lengths.max())
        for head, length in enumerate(self.kept.sum(axis=1)):
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
        """The values of the rows that heads see, [layers, KV heads, length], `behind` a head's last. Of heads that keep
        the same rows their mean, [1, 1, length]."""
        out = np.full((len(values), self.lengths.max()), behind, values.dtype)
        for head, kept in enumerate(self.kept):
            out[head, : kept.sum()] = values[head, kept]
        out = out.reshape(len(self.layers), self.spec.kv_heads, -1)
        return out.mean(axis=(0, 1), keepdims=True) if self.together else out


def some_rows(lengths: AnyArray, seed: int, *, newest: bool = False, alike: bool = False) -> list[IntArray]:
    """For every head, rows of its own choice and number. newest: also the newest, behind which llama.cpp cannot leave a
    gap. alike: equally many of every head."""
    random, lengths = np.random.default_rng(seed), lengths.reshape(-1)
    counts = random.integers(lengths // 3, lengths)
    if alike:
        counts[:] = counts[0]
    chosen = [random.choice(length, count, replace=False) for length, count in zip(lengths, counts, strict=True)]
    if newest:
        chosen = [np.union1d(rows, length - 1) for rows, length in zip(chosen, lengths, strict=True)]
    return [np.sort(rows).astype(np.int32) for rows in chosen]


def all_keys(engine: Any) -> FloatArray:
    """[layers, KV heads, length, head], dequantized, of layers whose rows a policy chooses."""
    return np.stack([engine.kv.keys(layer) for layer in range(len(engine.kv.head_lengths))])


def assert_same_positions(kv: Any, oracle: HeadOracle) -> None:
    np.testing.assert_array_equal(kv.head_lengths.reshape(-1), oracle.lengths)
    positions = np.broadcast_to(kv.positions, (*kv.head_lengths.shape, kv.length))
    np.testing.assert_array_equal(positions, oracle.rows_of(oracle.positions, behind=-1))


def assert_same_rows(engine: Any, oracle: HeadOracle) -> None:
    """Positions, lengths and attention are what the oracle has."""
    assert_same_positions(engine.kv, oracle)
    if engine.kv.length:
        assert engine.kv.next_position == oracle.next_position
        np.testing.assert_allclose(engine.kv.attention, oracle.rows_of(oracle.attention), rtol=1e-4, atol=1e-4)


def follow_evictions(engine: Any, oracle: HeadOracle, *, alike: bool = False) -> None:
    """Logits, rows and attention are the oracle's through evictions and rotations, in chunks and steps. alike: heads
    keep equally many rows."""
    tokens, at = some_tokens(85), 0
    for step, count in enumerate((40, 9, 1, 17, 1, 17)):
        part, at = tokens[at : at + count], at + count
        engine.observe(3, votes=oracle.votes)
        ours, theirs = engine.forward_all(part), oracle.forward_all(part, observed=3)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
        assert_same_rows(engine, oracle)
        rows = some_rows(engine.kv.head_lengths, 1 + step, alike=alike)
        if step == 4 and not alike:
            rows[-1] = rows[-1][:0]  # a head may lose all
        engine.kv.keep_heads(rows)
        oracle.keep_heads(rows)
        assert_same_rows(engine, oracle)
        if step % 2:
            engine.kv.renumber()
            oracle.renumber()
            assert engine.kv.next_position == engine.kv.length
            assert_same_rows(engine, oracle)


class Recorder:
    """A policy that remembers what it was shown and what it chose."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.evictions, self.view, self.budget = 0, KVView(0), 0
        self.chosen = list[IntArray]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        self.view, self.budget, self.evictions = view, budget, self.evictions + 1
        self.chosen = self._policy.rows_to_keep(view, budget)
        return self.chosen


class Twin:
    """A session and an oracle that follows it; every step compares them."""

    def __init__(self, session: Session, oracle: HeadOracle | None) -> None:
        self.session, self.oracle = session, oracle
        self.exact = session.plan.config.kv_dtype == "f32"
        self.kv: Any = session.engine.kv
        self.policy = Recorder(make_policy(session.plan.kv_policy, session.plan.sinks))
        session._sequence.rows.policy = self.policy  # type: ignore[assignment]
        self.reset()

    def reset(self) -> None:
        self.session.reset()
        self.renumbered = self.policy.evictions = 0
        if self.oracle:
            self.oracle.reset()

    def feed_chunks(self, chunks: Sequence[tuple[int, int]]) -> int:
        """Feed random tokens, in chunks of a size and with a promised size of the next. Returns their number."""
        self.reset()
        tokens, at = some_tokens(sum(count for count, _ in chunks), len(chunks)), 0
        for count, upcoming in chunks:
            self.feed(tokens[at : at + count], upcoming)
            at += count
        return at

    def feed(self, tokens: IntArray, upcoming: int = 1) -> None:
        self._make_room(tokens.size)
        logits = self.session.forward(tokens, upcoming=upcoming, every=True)
        assert np.isfinite(logits).all()
        assert self.kv.head_lengths.mean() <= self.kv.capacity
        assert self.kv.next_position <= self.session.spec.context
        if not self.oracle:
            return
        engine: Any = self.session.engine
        observed = engine._queries if isinstance(engine, LlamaCppEngine) else engine._sequences[0].observed
        self.oracle.votes = self.policy.needs.votes
        answers = self.oracle.forward_all(tokens, observed=observed)
        if self.exact:
            np.testing.assert_allclose(logits, answers, rtol=0, atol=2 * EXACT)
        else:
            assert np.corrcoef(logits.ravel(), answers.ravel())[0, 1] > 0.98

    def _make_room(self, count: int) -> None:
        kv, evictions, position = self.kv, self.policy.evictions, self.kv.next_position
        keys, lengths = self._keys(), kv.head_lengths.reshape(-1)
        assert self.session.make_room(count)
        assert count <= kv.free <= kv.capacity
        if self.policy.evictions == evictions:
            return
        chosen, renumbered = self.policy.chosen, kv.next_position != position
        self._check_choice(chosen, lengths)
        if not renumbered:
            for rows, before, kept in zip(chosen, keys, self._keys(), strict=False):
                np.testing.assert_array_equal(kept[: rows.size], before[rows])
        self.renumbered += renumbered
        if self.oracle:
            self.oracle.keep_heads(chosen)
            if self.policy.needs.queries > 0:
                self.oracle.attention[:] = 0
            if renumbered:
                self.oracle.renumber()
            assert_same_positions(kv, self.oracle)

    def _keys(self) -> list[FloatArray]:
        """Of each head, [rows, head]; llama.cpp shows none."""
        engine = self.session.engine
        return [] if isinstance(engine, LlamaCppEngine) else list(np.concatenate(all_keys(engine)))

    def _check_choice(self, chosen: list[IntArray], lengths: IntArray) -> None:
        view, budget, sinks = self.policy.view, self.policy.budget, self.session.plan.sinks
        recent = recent_rows(self.policy, budget)
        even = self.policy.needs.uneven == "token"
        assert sum(rows.size for rows in chosen) <= budget * len(chosen)
        for rows, length in zip(chosen, lengths.tolist(), strict=True):
            assert rows.size == min(budget, length) if even else rows.size <= length
            assert set(range(min(sinks, rows.size))) <= set(rows.tolist())
            last = min(recent, max(0, rows.size - sinks))
            assert set(range(length - last, length)) <= set(rows.tolist())
        if self.oracle and view.attention.size and self.exact:
            attention = self.oracle.rows_of(self.oracle.attention)
            np.testing.assert_allclose(view.attention, attention, rtol=1e-4, atol=1e-4)


def recent_rows(policy: Any, budget: int) -> int:
    """The number of newest rows that a policy promises to keep."""
    if policy.name in ("snapkv", "pyramidkv", "adakv"):
        return int(policy.window)
    return 1 if policy.name == "tova" else int(policy.recent * budget)
