"""Policies that evict head by head, in sessions on the native engine, beside an oracle that only hides rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, bring_back, examples, exhaustive, load_engine, open_golden, some_tokens
from heads_oracle import HeadOracle, feed_chunks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import Small, write_small
from test_architectures import require_native

from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.backends.reference import learned
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.kv.regions import TILE, Regions
from edge.errors import InputError, UnsupportedError
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.run.sequences.eviction import keep_heads, view_for
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import AnyArray, FloatArray, IntArray

CHUNK, SINKS = 8, 3
HEAD_POLICIES = (
    "h2o", "tova", "scissorhands:window=6", "snapkv:window=5,kernel=3", "keydiff", "knorm", "kvzap",
    "pyramidkv:window=4,slope=6", "adakv:window=4", "fastgen",
)  # fmt: skip
EXACT = 1e-3  # largest error of a logit; their standard deviation is 3


@pytest.fixture(autouse=True)
def native_here() -> None:
    require_native()


def model_of(name: str) -> Model:
    return open_golden(name).model if name.startswith("llama-gqa") else open_model(GOLDEN / f"{name}.gguf")


def native_engine(model: Model, dtype: str = "f32", capacity: int = 128) -> NativeEngine:
    engine = load_engine(model, "cpu", dtype, capacity=capacity, chunk=CHUNK, observes=True)
    assert isinstance(engine, NativeEngine)
    return engine


def some_rows(lengths: AnyArray, seed: int) -> list[IntArray]:
    """For every head, rows of its own choice and number."""
    random = np.random.default_rng(seed)
    return [
        np.sort(random.choice(length, random.integers(length // 3, length), replace=False)).astype(np.int32)
        for length in lengths.reshape(-1).tolist()
    ]


def all_keys(engine: Engine) -> FloatArray:
    """[layers, KV heads, length, head], dequantized, of layers whose rows a policy chooses."""
    return np.stack([engine.kv.keys(layer) for layer in range(len(engine.kv.head_lengths))])  # type: ignore[attr-defined]


def assert_same_rows(engine: NativeEngine, oracle: HeadOracle, atol: float = 1e-4) -> None:
    """Positions, lengths, attention and ages are what the oracle has."""
    kv = engine.kv
    np.testing.assert_array_equal(kv.head_lengths.reshape(-1), oracle.lengths)
    positions = np.broadcast_to(kv.positions, (*kv.head_lengths.shape, kv.length))
    np.testing.assert_array_equal(positions, oracle.rows_of(oracle.positions, behind=-1))
    assert kv.next_position == oracle.next_position
    np.testing.assert_allclose(kv.attention, oracle.rows_of(oracle.attention), rtol=1e-4, atol=atol)


# What the engine does


@pytest.mark.parametrize("name", [
    "llama-gqa-tied", "llama-window", "gemma4", *map(exhaustive, ("gemma3", "phi3", "gpt2", "mistral3", "smollm3")),
])  # fmt: skip
def test_heads_keep_and_renumber_their_own_rows(name: str, engines: Callable[[Engine], Engine]) -> None:
    """Windows, two rotations, partial rotation and none, temperatures; attention after evictions, too."""
    model, tokens = model_of(name), some_tokens(85, 1)
    native, oracle = native_engine(model), HeadOracle(model, capacity=128, chunk=CHUNK)
    engines(native)
    native.observe(3)
    at = 0
    for step, count in enumerate((40, 9, 1, 17, 1, 17)):
        part, at = tokens[at : at + count], at + count
        ours, theirs = native.forward_all(part), oracle.forward_all(part, observed=3)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
        assert_same_rows(native, oracle)
        rows = some_rows(native.kv.head_lengths, 1 + step)
        if step == 4:
            rows[-1] = rows[-1][:0]  # a head may lose all
        native.kv.keep_heads(rows)
        oracle.keep_heads(rows)
        assert_same_rows(native, oracle)
        if step % 2:
            native.kv.renumber()
            oracle.renumber()
            assert native.kv.next_position == native.kv.length
            assert_same_rows(native, oracle)


def test_restored_cache_has_no_attention_of_others(engines: Callable[[Engine], Engine]) -> None:
    native = native_engine(model_of("llama-gqa-tied"))
    engines(native)
    native.forward_all(some_tokens(20))
    state = native.kv.save()
    native.observe(CHUNK)
    native.kv.truncate(0)
    native.forward_all(some_tokens(30, 2))
    assert native.kv.attention.any()
    bring_back(native.kv, state)
    assert not native.kv.attention.any()


def test_unsupported_policies_of_heads_are_refused(engines: Callable[[Engine], Engine]) -> None:
    native = native_engine(model_of("llama-gqa-tied"))
    engines(native)
    heads = native.spec.layers * native.spec.kv_heads
    native.forward_all(some_tokens(16))
    assert not native.kv.attention.any()  # nothing is added up unless it is asked for
    with pytest.raises(InputError, match="heads"):
        native.kv.keep_heads([np.arange(3, dtype=np.int32)])
    with pytest.raises(InputError, match="rows to keep"):
        native.kv.keep_heads([np.array([16], np.int32)] * heads)
    native.kv.keep_heads(some_rows(native.kv.head_lengths, 0))
    with pytest.raises(UnsupportedError, match="gaps"):
        native.kv.keep(np.arange(4, dtype=np.int32), close_gaps=True)
    with pytest.raises(UnsupportedError, match="saved"):
        native.kv.save()


# Sessions


class Recorder:
    """A policy that remembers what it was shown and what it chose."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.evictions = 0
        self.view: KVView | None = None
        self.budget, self.chosen = 0, list[IntArray]()

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
        self.kv = session.engine.kv
        self.policy = session._sequence.rows.policy = Recorder(make_policy(session.plan.kv_policy, session.plan.sinks))
        self.renumbered = 0
        self.reset()

    def reset(self) -> None:
        self.session.reset()
        self.renumbered = self.policy.evictions = 0
        if self.oracle:
            self.oracle.reset()

    def feed(self, tokens: IntArray, upcoming: int = 1) -> None:
        self._make_room(tokens.size)
        logits = self.session.forward(tokens, upcoming=upcoming, every=True)
        assert np.isfinite(logits).all()
        assert (self.kv.lengths <= self.kv.store.limits).all()
        assert self.kv.head_lengths.mean() <= self.kv.capacity
        assert self.kv.next_position <= self.session.spec.context
        if self.oracle:
            self.oracle.votes = self.policy.needs.votes
            answers = self.oracle.forward_all(tokens, observed=self.session.engine._sequences[0].observed)
            if self.exact:
                np.testing.assert_allclose(logits, answers, rtol=0, atol=EXACT)
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
            kept = self._keys()
            for head, rows in enumerate(chosen):
                np.testing.assert_array_equal(kept[head, : rows.size], keys[head, rows])
        self.renumbered += renumbered
        if self.oracle:
            self.oracle.keep_heads(chosen)
            if self.policy.needs.queries > 0:
                self.oracle.attention[:] = 0
            if renumbered:
                self.oracle.renumber()
            positions = np.broadcast_to(kv.positions, (*kv.head_lengths.shape, kv.length))
            np.testing.assert_array_equal(positions, self.oracle.rows_of(self.oracle.positions, behind=-1))

    def _keys(self) -> FloatArray:
        """[heads of all layers, rows, head]."""
        return np.concatenate(list(all_keys(self.session.engine)))

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
    """How many of the newest rows a policy promises to keep."""
    if policy.name in ("snapkv", "pyramidkv", "adakv"):
        return int(policy.window)
    return 1 if policy.name == "tova" else int(policy.recent * budget)


@lru_cache
def twin_of(policy: str, capacity: int, dtype: str = "f32", model: str = "llama-gqa-tied") -> Twin:
    """Loaded once: every example resets it."""
    opened = model_of(model)
    session = load(
        opened, backend="cpu", kv_policy=policy, sinks=SINKS, max_kv_size=capacity, kv_dtype=dtype, threads=1,
        prefill_step_size=CHUNK, logits_rows=CHUNK,
    )  # fmt: skip
    return Twin(session, oracle_of(model))


@lru_cache
def oracle_of(model: str) -> HeadOracle:
    return HeadOracle(model_of(model), capacity=400, chunk=CHUNK)


CHUNKS = st.lists(st.tuples(st.integers(1, CHUNK), st.integers(1, CHUNK)), min_size=1, max_size=25)
CAPACITIES = st.sampled_from([16, 23, 40])


@pytest.mark.parametrize("policy", HEAD_POLICIES)
@settings(max_examples=examples(6))
@given(capacity=CAPACITIES, chunks=CHUNKS)
@example(capacity=16, chunks=[(8, 8), (8, 8), (8, 1), *[(1, 1)] * 20, (8, 8)])
def test_session_equals_an_oracle_that_masks_rows(policy: str, capacity: int, chunks: list[tuple[int, int]]) -> None:
    """Chunks of any size; what is announced of the next one may be wrong."""
    twin = twin_of(policy, capacity)
    assert (feed_chunks(twin, chunks) > capacity) == bool(twin.policy.evictions)


@pytest.mark.parametrize("policy", ["adakv:window=4"])
@settings(max_examples=examples(6))
@given(capacity=CAPACITIES, chunks=CHUNKS)
def test_session_with_int8_cache_keeps_its_rows(policy: str, capacity: int, chunks: list[tuple[int, int]]) -> None:
    twin = twin_of(policy, capacity, "int8")
    feed_chunks(twin, chunks)


def test_h2o_counts_queries_that_saw_row() -> None:
    twin = twin_of("h2o", 40)
    twin.reset()
    for part in [*np.split(some_tokens(64), 8), *some_tokens(60)[:, None]]:
        twin.feed(part)
        np.testing.assert_array_equal(twin.kv.ages, twin.oracle.rows_of(twin.oracle.seen))
    assert twin.policy.evictions > 5


@given(st.data(), st.integers(1, 12), st.integers(1, 70), st.integers(1, 4))
def test_regions_never_overlap_and_moves_keep_rows(data: st.DataObject, heads: int, capacity: int, times: int) -> None:
    """Beside the same done with a copy of everything."""
    regions = Regions(heads, capacity, 3 * capacity, uneven=True)
    memory = np.full(regions.size, -1)
    held = [np.full(capacity, head) for head in range(heads)]
    for head, rows in enumerate(held):
        memory[regions.starts[head] : regions.starts[head] + rows.size] = rows
    for _ in range(times):
        lengths, left = [], capacity * heads
        for rows in held:
            lengths.append(data.draw(st.integers(0, min(rows.size, left))))
            left -= lengths[-1]
        for move in regions.share_out(np.array(lengths, np.int32)):
            memory[move.target : move.target + move.count] = memory[move.source : move.source + move.count].copy()
        free = regions.limits - lengths
        assert (free == free[0]).all()
        assert free[0] >= 0
        assert (regions.limits <= regions.longest).all()
        assert (regions.starts % TILE == 0).all()
        assert (regions.starts[:-1] + regions.limits[:-1] <= regions.starts[1:]).all()
        assert regions.starts[-1] + regions.limits[-1] <= regions.size
        for head, length in enumerate(lengths):
            held[head] = np.full(regions.limits[head], head)
            start = regions.starts[head]
            np.testing.assert_array_equal(memory[start : start + length], head)
            memory[start : start + regions.limits[head]] = head


def small_model(path: Path, context: int, **shape: Any) -> Model:
    """By default of a golden model's shape, for which the native engine is compiled already."""
    return open_model(write_small(path / "small.gguf", Small(context=context, **{"layers": 2, **shape})))


@pytest.mark.parametrize(("policy", "dtype"), [("h2o", "f32"), ("snapkv:window=5", "int8"), ("fastgen", "f32")])
def test_endless_decoding_stays_within_context(policy: str, dtype: str, tmp_path: Path) -> None:
    model = small_model(tmp_path, 62)
    with load(
        model, backend="cpu", kv_policy=policy, max_kv_size=32, kv_dtype=dtype, threads=1, prefill_step_size=CHUNK
    ) as session:
        compared = HeadOracle(model, capacity=300, chunk=1) if dtype == "f32" else None
        twin = Twin(session, compared)
        for count, token in enumerate(some_tokens(700)):
            if count == 150:
                twin.oracle = None
            twin.feed(token[None])
        assert twin.renumbered > 15


# System prompts


@pytest.mark.parametrize("policy", HEAD_POLICIES)
def test_system_prompts_rows_outlive_every_eviction(policy: str, open_session: Callable[..., Session]) -> None:
    session = open_session(backend="cpu", kv_policy=policy, keep=15, max_kv_size=48, kv_dtype="f32")
    tokens = some_tokens(120)
    session.generate(tokens[:20], max_tokens=1, ignore_eos=True)
    first = [session.engine.kv.keys(layer)[:, :15].copy() for layer in range(session.spec.layers)]
    session.generate(tokens[20:], max_tokens=60, ignore_eos=True, follow_up=True)
    assert session.report.kv.evicted > 90
    for layer, keys in enumerate(first):
        np.testing.assert_array_equal(session.engine.kv.keys(layer)[:, :15], keys)


# Bytes


@pytest.mark.parametrize(("policy", "dtype"), [
    ("adakv:window=4", "f16"), ("kvzap", "f16"), ("h2o", "int4"),
    *(exhaustive(*each) for each in product(HEAD_POLICIES, ["f16", "int8", "int4"])),
])  # fmt: skip
def test_eviction_takes_no_more_than_was_counted(
    policy: str, dtype: str, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    """What NumPy allocates while rows are chosen, moved and renumbered, against the plan's scratch."""
    rows = 2048
    model = small_model(tmp_path, rows)
    backend, needs = find_backend("cpu", model.file, model.spec), make_policy(policy).needs
    config = EngineConfig(
        rows, 64, dtype, threads=1, observes=bool(needs.queries), per_head=True, uneven=needs.uneven != "token"
    )
    counted = backend.footprint(model.spec, config)
    without = backend.footprint(model.spec, replace(config, per_head=False))
    engine = engines(backend.load(model.file, model.spec, config))
    assert engine.kv.nbytes == counted.kv
    engine.forward(some_tokens(64))
    heads = model.spec.layers * model.spec.kv_heads
    engine.kv.keep_heads([np.arange(60, dtype=np.int32)] * heads)  # type: ignore[attr-defined]
    engine.forward(np.zeros(rows - 60, np.int32))
    known = learned.find(model.file, model.spec, some_tokens(64)) if needs.ranks else None
    tracemalloc.start()
    try:
        base = tracemalloc.get_traced_memory()[0]
        view = view_for(engine.kv, needs, learned=known)
        chosen = make_policy(policy).rows_to_keep(view, rows * 7 // 8)
        keep_heads(engine.kv, chosen, context=rows, forget=needs.queries > 0)
        peak = tracemalloc.get_traced_memory()[1] - base
    finally:
        tracemalloc.stop()
    assert engine.kv.positions.max() < engine.kv.length  # renumbered
    room = 12 * heads * rows  # slots and positions, which were allocated before
    assert peak <= counted.scratch - without.scratch - room + (64 << 10)
    assert peak >= (counted.scratch - without.scratch - room) / 5  # and not far more is counted
