"""llama.cpp's attention, and the policies that look at it, beside an oracle that hides rows from all heads alike."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, Engines, examples, exhaustive, load_engine, some_tokens
from heads_oracle import HeadOracle, feed_chunks
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends.base import EngineConfig
from edge.backends.llamacpp import ENGINE as LLAMACPP
from edge.backends.llamacpp.engine import LlamaCppEngine
from edge.backends.llamacpp.library import is_installed
from edge.backends.llamacpp.scores import Scores
from edge.errors import InputError, UnsupportedError
from edge.kv import KVView, make_policy
from edge.model.model import Model, open_model
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray, IntArray

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")

CHUNK, SINKS = 8, 3
POLICIES = ("h2o", "tova", "snapkv:window=5,kernel=3", "scissorhands:window=6")
EXACT = 2e-3  # largest error of a logit; their standard deviation is 3


class TokenOracle:
    """HeadOracle whose heads all keep the same rows; attention is the mean over them."""

    def __init__(self, model: Model, capacity: int) -> None:
        self.heads = HeadOracle(model, capacity, CHUNK)

    @property
    def length(self) -> int:
        return int(self.heads.lengths[0])

    @property
    def positions(self) -> IntArray:
        return np.asarray(self.heads.rows_of(self.heads.positions)[0, 0])

    @property
    def attention(self) -> FloatArray:
        return np.asarray(self.heads.rows_of(self.heads.attention).mean(axis=(0, 1)))

    def keep(self, rows: IntArray) -> None:
        self.heads.keep_heads([rows] * len(self.heads.kept))

    def truncate(self, length: int) -> None:
        if length == 0:
            self.heads.reset()
            return
        self.keep(np.arange(length, dtype=np.int32))
        self.heads.engine.kv.next_position = int(self.positions[-1]) + 1


def some_rows(length: int, seed: int) -> IntArray:
    """The newest and some others: llama.cpp cannot leave a gap behind it."""
    chosen = np.random.default_rng(seed).random(length) < 0.6
    chosen[-1] = True
    return np.flatnonzero(chosen).astype(np.int32)


def observed_engine(model: Model, dtype: str = "f32", capacity: int = 48) -> LlamaCppEngine:
    engine = load_engine(model, "llamacpp", dtype, capacity=capacity, chunk=CHUNK, observes=True)
    assert isinstance(engine, LlamaCppEngine)
    return engine


def model_of(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def assert_same_rows(engine: LlamaCppEngine, oracle: TokenOracle) -> None:
    kv = engine.kv
    assert kv.length == oracle.length
    assert kv.head_lengths.tolist() == [[kv.length]]
    if kv.length == 0:
        return
    assert kv.next_position == oracle.heads.next_position
    np.testing.assert_array_equal(kv.positions, oracle.positions)
    np.testing.assert_array_equal(kv.ages[0, 0], kv.next_position - oracle.positions)
    np.testing.assert_allclose(kv.attention[0, 0], oracle.attention, rtol=1e-4, atol=1e-4)


# What the engine does


OPERATION = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 24), st.integers(0, CHUNK)),
    st.tuples(st.just("append"), st.integers(1, 24), st.integers(0, CHUNK)),
    st.tuples(st.just("keep"), st.integers(0, 2**32 - 1)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("renumber")),
    st.tuples(st.just("clear")),
)


@lru_cache
def engine_and_oracle(name: str) -> tuple[LlamaCppEngine, TokenOracle]:
    """Loaded once: every example empties them."""
    model = model_of(name)
    return observed_engine(model), TokenOracle(model, capacity=400)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3", *map(exhaustive, ("llama-rope-scaled", "qwen2"))])
@settings(max_examples=examples(20))
@given(operations=st.lists(OPERATION, min_size=3, max_size=15))
def test_scores_equal_the_references_after_any_history(name: str, operations: list[tuple[Any, ...]]) -> None:
    """In whichever cells llama.cpp has put the rows."""
    engine, oracle = engine_and_oracle(name)
    tokens = some_tokens(24 * len(operations))
    engine.kv.truncate(0)
    oracle.heads.reset()
    for operation, *arguments in operations:
        length = engine.kv.length
        if operation == "append" and engine.kv.free:
            (count, queries), tokens = arguments, tokens[arguments[0] :]
            part = tokens[: min(count, engine.kv.free)]
            engine.observe(queries)
            ours, theirs = engine.forward_all(part), oracle.heads.forward_all(part, observed=queries)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
        elif operation == "keep" and length:
            rows = some_rows(length, *arguments)
            engine.kv.keep_heads([rows])
            oracle.keep(rows)
        elif operation == "truncate":
            engine.kv.truncate(round(arguments[0] * length))
            oracle.truncate(engine.kv.length)
        elif operation == "renumber" and length:
            engine.kv.renumber()
            oracle.heads.renumber()
        elif operation == "clear":
            engine.kv.clear_attention()
            oracle.heads.attention[:] = 0
        assert_same_rows(engine, oracle)


@pytest.mark.parametrize("queries", [1, 3, CHUNK])
def test_votes_are_queries_that_paid_more_than_average(queries: int, engines: Engines) -> None:
    model, tokens = model_of("llama-gqa-tied"), some_tokens(60)
    engine, oracle = observed_engine(model), TokenOracle(model, 100)
    engines(engine)
    oracle.heads.votes = True
    engine.observe(queries, votes=True)
    for part in (tokens[:45], tokens[45:]):
        engine.forward(part)
        oracle.heads.forward_all(part, observed=queries)
        assert_same_rows(engine, oracle)
        assert engine.kv.attention.any()
        rows = some_rows(engine.kv.length, 1)
        engine.kv.keep_heads([rows])
        oracle.keep(rows)


def test_scores_accumulate_only_on_request(engines: Engines) -> None:
    model, tokens = model_of("llama-gqa-tied"), some_tokens(40)
    engine, plain = observed_engine(model), load_engine(model, "llamacpp", "f32", capacity=48)
    engines(engine)
    engines(plain)
    np.testing.assert_array_equal(engine.forward_all(tokens), plain.forward_all(tokens))
    assert not engine.kv.attention.any()
    assert isinstance(plain, LlamaCppEngine)
    with pytest.raises(UnsupportedError, match="observes"):
        plain.observe(1)
    with pytest.raises(UnsupportedError, match="observes"):
        _ = plain.kv.attention


@pytest.mark.parametrize("cut", [0, 8])
def test_saved_rows_come_back_without_attention(cut: int, engines: Engines) -> None:
    model, tokens = model_of("llama-gqa-tied"), some_tokens(48)
    engine, oracle = observed_engine(model), TokenOracle(model, 100)
    engines(engine)
    engine.forward(tokens[:20])
    state = engine.kv.save(cut)
    engine.observe(CHUNK)
    engine.kv.truncate(0)
    engine.forward(tokens[::-1][:30])
    engine.kv.keep_heads([some_rows(30, 1)])
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        engine.kv.save()
    with pytest.raises(InputError, match="saved KV rows do not"):
        engine.kv.append(replace(state, positions=state.positions + 30, next_position=50))
    engine.kv.truncate(0)
    if cut:
        engine.forward(tokens[:cut])
        oracle.heads.forward_all(tokens[:cut], observed=CHUNK)
    engine.kv.append(state)
    oracle.heads.forward_all(tokens[cut:20])
    assert_same_rows(engine, oracle)
    ours, theirs = engine.forward_all(tokens[20:40]), oracle.heads.forward_all(tokens[20:40], observed=CHUNK)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
    assert_same_rows(engine, oracle)


# What goes wrong


@pytest.mark.parametrize("error", [ValueError("of ours"), KeyboardInterrupt()])
def test_callback_errors_are_raised_and_leave_no_rows(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, engines: Engines
) -> None:
    model, tokens = model_of("llama-gqa-tied"), some_tokens(40)
    engine, oracle = observed_engine(model), TokenOracle(model, 100)
    engines(engine)
    engine.observe(CHUNK)
    oracle.heads.forward_all(tokens[:20], observed=CHUNK)
    engine.forward(tokens[:20])
    add = Scores._add

    def fail(self: Scores, softmax: Any) -> None:
        add(self, softmax)
        raise error

    for part in (tokens[20:25], tokens[25:26]):
        with monkeypatch.context() as patch:
            patch.setattr(Scores, "_add", fail)
            with pytest.raises(type(error)):
                engine.forward(part)
        assert_same_rows(engine, oracle)
    ours, theirs = engine.forward_all(tokens[20:]), oracle.heads.forward_all(tokens[20:], observed=CHUNK)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
    assert_same_rows(engine, oracle)


@pytest.mark.parametrize("when", [True, False])
def test_interrupt_waits_for_the_end_of_the_pass(when: bool, monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    """Python would raise it on entry to the callback, where ctypes prints and forgets it, and so end the pass early."""
    model, tokens, sent = model_of("llama-gqa-tied"), some_tokens(40), list[bool]()
    receive = Scores._receive

    def interrupted(self: Scores, tensor: int, asks: bool, data: int | None) -> bool:
        if asks is when and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return receive(self, tensor, asks, data)

    monkeypatch.setattr(Scores, "_receive", interrupted)
    engine, oracle = observed_engine(model), TokenOracle(model, 100)
    engines(engine)
    engine.observe(CHUNK)
    with pytest.raises(KeyboardInterrupt):
        engine.forward(tokens[:CHUNK])
    assert sent
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    oracle.heads.forward_all(tokens[:CHUNK], observed=CHUNK)
    assert_same_rows(engine, oracle)  # the pass has run to its end
    ours, theirs = engine.forward_all(tokens[CHUNK:]), oracle.heads.forward_all(tokens[CHUNK:], observed=CHUNK)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)


@pytest.mark.parametrize("observes", [False, True])
def test_interrupted_pass_is_booked(observes: bool, monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    """Or the next one would find rows in llama.cpp that edge knows nothing of."""
    model, tokens = model_of("llama-gqa-tied"), some_tokens(40)
    engine = load_engine(model, "llamacpp", "f32", chunk=CHUNK, observes=observes)
    oracle = engines(load_engine(model, "reference", "f32"))
    engines(engine)
    assert isinstance(engine, LlamaCppEngine)
    decode = engine._lib.llama_decode

    def interrupted(context: Any, batch: Any) -> Any:
        status = decode(context, batch)
        signal.raise_signal(signal.SIGINT)
        return status

    with monkeypatch.context() as patch:
        patch.setattr(engine._lib, "llama_decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.forward(tokens[:5])
    assert engine.kv.length == 5
    theirs = oracle.forward_all(tokens)[5:]
    np.testing.assert_allclose(engine.forward_all(tokens[5:]), theirs, rtol=0, atol=EXACT)


def test_unobservable_models_are_refused(tmp_path: Path, engines: Engines) -> None:
    model = model_of("llama-gqa-tied")
    engine = observed_engine(model)
    engines(engine)
    engine.forward(some_tokens(20))
    with pytest.raises(UnsupportedError, match="keys"):
        engine.kv.keys(0)
    with pytest.raises(InputError, match="1 head"):
        engine.kv.keep_heads([np.array([19], np.int32)] * 2)
    with pytest.raises(UnsupportedError, match="keep the newest row"):
        engine.kv.keep_heads([np.arange(10, dtype=np.int32)])
    with pytest.raises(UnsupportedError, match="sliding windows"):
        observed_engine(model_of("gemma3"))
    q8 = open_model(write_small(tmp_path / "q8.gguf", Small(hidden=128, heads=2, kv_heads=2, head=64)))
    with pytest.raises(UnsupportedError, match="--kv-dtype f16"):
        load(q8, backend="llamacpp", kv_policy="h2o", kv_dtype="q8_0")
    for policy, missing in [
        ("keydiff", "shows keys"), ("knorm", "shows keys"), ("pyramidkv", "for every layer"),
        ("adakv", "for every head"), ("fastgen", "for every head"),
        ("h2o:recent=0", "may evict the newest row"), ("scissorhands:recent=0.001", "may evict the newest row"),
    ]:  # fmt: skip
        with pytest.raises(UnsupportedError, match=missing):
            load(model, backend="llamacpp", kv_policy=policy)


def test_unshiftable_model_ends_with_its_context(tmp_path: Path) -> None:
    fields = {"rope__scaling__type": "yarn", "rope__scaling__factor": 2.0, "rope__scaling__original_context_length": 32}
    model = open_model(write_small(tmp_path / "yarn.gguf", Small(context=64), **fields))
    with load(model, backend="llamacpp", kv_policy="h2o", max_kv_size=32, threads=1) as session:
        assert session.generate(some_tokens(20), max_tokens=30, ignore_eos=True)
        with pytest.raises(UnsupportedError, match="end of its context"):
            session.generate(some_tokens(20), max_tokens=80, ignore_eos=True)


# Sessions


class Recorder:
    """A policy that remembers what it was shown and what it chose."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.evictions, self.view, self.chosen = 0, KVView(0), np.zeros(0, np.int32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        (self.chosen,) = self._policy.rows_to_keep(view, budget)
        self.view, self.evictions = view, self.evictions + 1
        return [self.chosen]


class Twin:
    """A session and an oracle that follows it; every step compares them."""

    def __init__(self, session: Session, oracle: TokenOracle | None) -> None:
        self.session, self.oracle, self.kv = session, oracle, session.engine.kv
        self.policy = Recorder(make_policy(session.plan.kv_policy, session.plan.sinks))
        session._sequence.rows.policy = self.policy  # type: ignore[assignment]
        self.renumbered = 0

    def reset(self) -> None:
        self.session.reset()
        self.policy.evictions = self.renumbered = 0
        if self.oracle:
            self.oracle.heads.reset()

    def feed(self, tokens: IntArray, upcoming: int = 1) -> None:
        self._make_room(tokens.size)
        logits = self.session.forward(tokens, upcoming=upcoming, every=True)
        assert np.isfinite(logits).all()
        assert self.kv.length <= self.kv.capacity
        engine = self.session.engine
        assert isinstance(engine, LlamaCppEngine)
        assert engine.kv.next_position <= self.session.spec.context
        if self.oracle:
            self.oracle.heads.votes = self.policy.needs.votes
            answers = self.oracle.heads.forward_all(tokens, observed=engine._queries)
            np.testing.assert_allclose(logits, answers, rtol=0, atol=EXACT)
            assert_same_rows(engine, self.oracle)

    def _make_room(self, count: int) -> None:
        evictions, position = self.policy.evictions, self.kv.next_position  # type: ignore[attr-defined]
        assert self.session.make_room(count)
        assert self.kv.length + count <= self.kv.capacity
        if self.policy.evictions == evictions:
            return
        chosen, renumbered = self.policy.chosen, self.kv.next_position != position  # type: ignore[attr-defined]
        sinks = min(self.session.plan.sinks, chosen.size)
        np.testing.assert_array_equal(chosen[:sinks], np.arange(sinks))
        assert chosen[-1] == self.policy.view.length - 1
        self.renumbered += renumbered
        if self.oracle:
            assert self.policy.view.attention.size
            attention = self.policy.view.attention[0, 0]
            np.testing.assert_allclose(attention, self.oracle.attention, rtol=1e-4, atol=1e-4)
            self.oracle.keep(chosen)
            if self.policy.needs.queries > 0:
                self.oracle.heads.attention[:] = 0
            if renumbered:
                self.oracle.heads.renumber()


@lru_cache
def oracle() -> TokenOracle:
    return TokenOracle(model_of("llama-gqa-tied"), capacity=400)


@lru_cache
def twin_of(policy: str, capacity: int) -> Twin:
    """Loaded once: every example resets it."""
    session = load(
        model_of("llama-gqa-tied"), backend="llamacpp", kv_policy=policy, sinks=SINKS, max_kv_size=capacity,
        kv_dtype="f32", threads=1, prefill_step_size=CHUNK, logits_rows=CHUNK,
    )  # fmt: skip
    return Twin(session, oracle())


CHUNKS = st.lists(st.tuples(st.integers(1, CHUNK), st.integers(1, CHUNK)), min_size=1, max_size=25)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(8))
@given(capacity=st.sampled_from([16, 23, 40]), chunks=CHUNKS)
@example(capacity=16, chunks=[(8, 8), (8, 8), (8, 1), *[(1, 1)] * 20, (8, 8)])
def test_session_equals_an_oracle_that_hides_rows(policy: str, capacity: int, chunks: list[tuple[int, int]]) -> None:
    twin = twin_of(policy, capacity)
    assert (feed_chunks(twin, chunks) > capacity) == bool(twin.policy.evictions)


@pytest.mark.parametrize("policy", POLICIES[1:3])
def test_endless_decoding_stays_within_the_context(policy: str, tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "small.gguf", Small(context=62)))
    with load(
        model, backend="llamacpp", kv_policy=policy, max_kv_size=32, kv_dtype="f32", threads=1, prefill_step_size=CHUNK
    ) as session:
        twin = Twin(session, TokenOracle(model, 300))
        for count, token in enumerate(some_tokens(1000)):
            if count == 300:
                twin.oracle = None
            twin.feed(token[None])
        assert twin.renumbered > 10


def test_scratch_is_counted_as_soon_as_attention_is_observed(smollm2: Model) -> None:
    """llama.cpp's own log says 46.38 MiB for these sizes, 15.51 with flash attention."""
    config = EngineConfig(2048, 512, "f16", threads=2)
    flash, observed = (LLAMACPP.footprint(smollm2.spec, replace(config, observes=each)) for each in (False, True))
    assert observed.scratch - flash.scratch > (46.38 - 15.51) * 2**20
    assert observed.scratch - flash.scratch < 1.7 * (46.38 - 15.51) * 2**20  # and what products round
