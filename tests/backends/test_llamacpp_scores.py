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
from heads_oracle import HeadOracle, Twin, assert_same_rows, some_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import Small, write_small

from edge.backends.base import EngineConfig
from edge.backends.llamacpp import ENGINE as LLAMACPP
from edge.backends.llamacpp.engine import LlamaCppEngine
from edge.backends.llamacpp.library import is_installed
from edge.backends.llamacpp.scores import Scores
from edge.errors import InputError, UnsupportedError
from edge.model.model import Model, open_model
from edge.run.starting.loading import load
from edge.types import IntArray

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")

CHUNK, SINKS = 8, 3
POLICIES = ("h2o", "tova", "snapkv:window=5,kernel=3", "scissorhands:window=6")
EXACT = 2e-3  # largest error of a logit; their standard deviation is 3


def observed_engine(model: Model, dtype: str = "f32", capacity: int = 48) -> LlamaCppEngine:
    return load_engine(model, "llamacpp", dtype, capacity=capacity, chunk=CHUNK, observes=True)


def model_of(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def oracle_of(model: Model, capacity: int = 400) -> HeadOracle:
    return HeadOracle(model, capacity, CHUNK, together=True)


def keep_some(engine: LlamaCppEngine, oracle: HeadOracle, seed: int) -> None:
    rows = some_rows(engine.kv.head_lengths, seed, newest=True)
    engine.kv.keep_heads(rows)
    oracle.keep_heads(rows)


@pytest.fixture
def both(engines: Engines) -> tuple[LlamaCppEngine, HeadOracle]:
    """An engine that observes, and an oracle, of one model."""
    model = model_of("llama-gqa-tied")
    engine = observed_engine(model)
    engines(engine)
    return engine, oracle_of(model)


def assert_goes_on(engine: LlamaCppEngine, oracle: HeadOracle, tokens: IntArray) -> None:
    """Logits and rows of further tokens, all of which are observed, are the oracle's."""
    ours, theirs = engine.forward_all(tokens), oracle.forward_all(tokens, observed=CHUNK)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
    assert_same_rows(engine, oracle)


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
def engine_and_oracle(name: str) -> tuple[LlamaCppEngine, HeadOracle]:
    """Loaded once: every example empties them."""
    model = model_of(name)
    return observed_engine(model), oracle_of(model)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3", exhaustive("llama-rope-scaled")])
@settings(max_examples=examples(20))
@given(operations=st.lists(OPERATION, min_size=3, max_size=15))
def test_scores_equal_the_references_after_any_history(name: str, operations: list[tuple[Any, ...]]) -> None:
    """In whichever cells llama.cpp has put the rows."""
    engine, oracle = engine_and_oracle(name)
    tokens = some_tokens(24 * len(operations))
    engine.kv.truncate(0)
    oracle.reset()
    for operation, *arguments in operations:
        length = engine.kv.length
        if operation == "append" and engine.kv.free:
            (count, queries), tokens = arguments, tokens[arguments[0] :]
            part = tokens[: min(count, engine.kv.free)]
            engine.observe(queries)
            ours, theirs = engine.forward_all(part), oracle.forward_all(part, observed=queries)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
        elif operation == "keep" and length:
            keep_some(engine, oracle, *arguments)
        elif operation == "truncate":
            engine.kv.truncate(round(arguments[0] * length))
            oracle.truncate(engine.kv.length)
        elif operation == "renumber" and length:
            engine.kv.renumber()
            oracle.renumber()
        elif operation == "clear":
            engine.kv.clear_attention()
            oracle.attention[:] = 0
        assert_same_rows(engine, oracle)
        np.testing.assert_array_equal(engine.kv.ages[0, 0], engine.kv.next_position - engine.kv.positions)


def test_scores_accumulate_only_on_request(engines: Engines) -> None:
    model, tokens = model_of("llama-gqa-tied"), some_tokens(40)
    engine, plain = observed_engine(model), load_engine(model, "llamacpp", "f32", capacity=48)
    engines(engine)
    engines(plain)
    np.testing.assert_array_equal(engine.forward_all(tokens), plain.forward_all(tokens))
    assert not engine.kv.attention.any()
    with pytest.raises(UnsupportedError, match="observes"):
        plain.observe(1)
    with pytest.raises(UnsupportedError, match="observes"):
        _ = plain.kv.attention


@pytest.mark.parametrize("cut", [0, 8])
def test_saved_rows_come_back_without_attention(cut: int, both: tuple[LlamaCppEngine, HeadOracle]) -> None:
    (engine, oracle), tokens = both, some_tokens(48)
    engine.forward(tokens[:20])
    state = engine.kv.save(cut)
    engine.observe(CHUNK)
    engine.kv.truncate(0)
    engine.forward(tokens[::-1][:30])
    engine.kv.keep_heads(some_rows(engine.kv.head_lengths, 1, newest=True))
    with pytest.raises(UnsupportedError, match="cannot be saved"):
        engine.kv.save()
    with pytest.raises(InputError, match="saved KV rows do not"):
        engine.kv.append(replace(state, positions=state.positions + 30, next_position=50))
    engine.kv.truncate(0)
    if cut:
        engine.forward(tokens[:cut])
        oracle.forward_all(tokens[:cut], observed=CHUNK)
    engine.kv.append(state)
    oracle.forward_all(tokens[cut:20])
    assert_same_rows(engine, oracle)
    assert_goes_on(engine, oracle, tokens[20:40])


# What goes wrong


@pytest.mark.parametrize("error", [ValueError("of ours"), KeyboardInterrupt()])
def test_callback_errors_are_raised_and_leave_no_rows(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, both: tuple[LlamaCppEngine, HeadOracle]
) -> None:
    (engine, oracle), tokens = both, some_tokens(40)
    engine.observe(CHUNK)
    oracle.forward_all(tokens[:20], observed=CHUNK)
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
    assert_goes_on(engine, oracle, tokens[20:])


@pytest.mark.parametrize("when", [True, False])
def test_interrupt_waits_for_the_end_of_the_pass(
    when: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Python would raise it on entry to the callback, where ctypes prints and forgets it, and so end the pass early."""
    tokens, sent, receive = some_tokens(40), list[bool](), Scores._receive

    def interrupted(self: Scores, tensor: int, asks: bool, data: int | None) -> bool:
        if asks is when and not sent:
            sent.append(True)
            signal.raise_signal(signal.SIGINT)
        return receive(self, tensor, asks, data)

    monkeypatch.setattr(Scores, "_receive", interrupted)
    engine, oracle = request.getfixturevalue("both")
    engine.observe(CHUNK)
    with pytest.raises(KeyboardInterrupt):
        engine.forward(tokens[:CHUNK])
    assert sent
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    oracle.forward_all(tokens[:CHUNK], observed=CHUNK)
    assert_same_rows(engine, oracle)  # the pass has run to its end
    assert_goes_on(engine, oracle, tokens[CHUNK:])


@pytest.mark.parametrize("observes", [False, True])
def test_interrupted_pass_is_booked(observes: bool, monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    """Or the next one would find rows in llama.cpp that edge knows nothing of."""
    model, tokens = model_of("llama-gqa-tied"), some_tokens(40)
    engine = load_engine(model, "llamacpp", "f32", chunk=CHUNK, observes=observes)
    oracle = engines(load_engine(model, "reference", "f32"))
    engines(engine)
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


@lru_cache
def twin_of(policy: str, capacity: int) -> Twin:
    """Loaded once: every example resets it."""
    session = load(
        model_of("llama-gqa-tied"), backend="llamacpp", kv_policy=policy, sinks=SINKS, max_kv_size=capacity,
        kv_dtype="f32", threads=1, prefill_step_size=CHUNK, logits_rows=CHUNK,
    )  # fmt: skip
    return Twin(session, engine_and_oracle("llama-gqa-tied")[1])


CHUNKS = st.lists(st.tuples(st.integers(1, CHUNK), st.integers(1, CHUNK)), min_size=1, max_size=25)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(8))
@given(capacity=st.sampled_from([16, 23, 40]), chunks=CHUNKS)
@example(capacity=16, chunks=[(8, 8), (8, 8), (8, 1), *[(1, 1)] * 20, (8, 8)])
def test_session_equals_an_oracle_that_hides_rows(policy: str, capacity: int, chunks: list[tuple[int, int]]) -> None:
    twin = twin_of(policy, capacity)
    assert (twin.feed_chunks(chunks) > capacity) == bool(twin.policy.evictions)


@pytest.mark.parametrize("policy", POLICIES[1:3])
def test_endless_decoding_stays_within_the_context(policy: str, tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "small.gguf", Small(context=62)))
    with load(
        model, backend="llamacpp", kv_policy=policy, max_kv_size=32, kv_dtype="f32", threads=1, prefill_step_size=CHUNK
    ) as session:
        twin = Twin(session, oracle_of(model))
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
