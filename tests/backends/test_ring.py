"""Rows of layers with sliding windows, in a ring: engines that have one, beside caches of all rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNK, GOLDEN, SHARED_FIXTURES, Engines, bring_back, examples, exhaustive, load_engine, some_tokens
from hypothesis import given, settings
from hypothesis import strategies as st
from test_architectures import EXACT, require_native
from test_conformance import OTHERS, SEEDS, run_operations

from edge.backends import find_backend, ring
from edge.backends.base import Engine
from edge.backends.kv_cache import RewindError, end_of
from edge.backends.ring import Ring
from edge.model.model import open_model
from edge.prompt_cache.cache import PromptCache
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.run.starting.loading import load

WINDOW = 20  # of these models
ENGINES = ["cpu", *(["onnx"] if find_spec("onnxruntime") else [])]
on_engines = pytest.mark.parametrize("backend", ENGINES)


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that 64 tokens go round."""
    require_native()
    monkeypatch.setattr(ring, "SLACK", 4)


def open_one(backend: str, name: str, dtype: str = "f32", **options: Any) -> Engine:
    return load_engine(open_model(GOLDEN / f"{name}.gguf"), backend, dtype, **{"capacity": 300, **options})


def bookkeeping(engine: Engine) -> Ring[Any]:
    return engine.kv.ring  # type: ignore[attr-defined]


@on_engines
@pytest.mark.parametrize(
    ("dtype", "name"),
    [("f32", "gemma2"), ("f16", "gemma3"), *(exhaustive(dtype, "gemma3") for dtype in ("int8", "int4"))],
)
def test_ring_equals_a_cache_of_all_rows(backend: str, dtype: str, name: str, engines: Engines) -> None:
    """Chunks of many sizes, and steps."""
    tokens = some_tokens(280)
    small, large = (engines(open_one(backend, name, dtype, chunk=chunk)) for chunk in (23, 300))
    at = 0
    for count in (23, 1, 40, 1, 1, 17, 100, 22, 23, 24, *[1] * 20):
        part, at = tokens[at : at + count], at + count
        np.testing.assert_allclose(small.forward_all(part), large.forward_all(part), rtol=0, atol=0.05)
    assert bookkeeping(small).length <= WINDOW + 23 + 4
    assert bookkeeping(large).length == at


OPERATION = st.one_of(*OTHERS, st.tuples(st.just("keep"), SEEDS, st.just(0.6), st.booleans(), st.just(True)))


@lru_cache
def ring_and_all_rows(backend: str) -> tuple[Engine, Engine]:
    """Loaded once: every example empties them."""
    small, large = (open_one(backend, "gemma3", capacity=96, chunk=chunk) for chunk in (8, 96))
    return small, large


@on_engines
@settings(max_examples=examples(20), suppress_health_check=SHARED_FIXTURES)
@given(operations=st.lists(OPERATION, min_size=6, max_size=20))
def test_any_operations_leave_a_ring_as_all_rows(backend: str, operations: list[tuple[Any, ...]]) -> None:
    """Rows are evicted, truncated as far as the ring reaches, saved and restored."""
    both = ring_and_all_rows(backend)
    run_operations(both, some_tokens(300), [("append", 14), ("append", 14), *operations, ("append", 3)])
    assert bookkeeping(both[0]).length <= WINDOW + 8 + 4


@on_engines
def test_cache_goes_back_as_far_as_its_ring(backend: str, engines: Engines) -> None:
    engine, tokens = engines(open_one(backend, "gemma3")), some_tokens(200)
    expected = engine.forward_all(tokens)
    kv = engine.kv
    assert 180 < kv.earliest < 200
    with pytest.raises(RewindError, match="run the tokens again"):
        kv.truncate(kv.earliest - 1)
    assert kv.length == 200
    kv.truncate(at := kv.earliest)
    np.testing.assert_allclose(engine.forward_all(tokens[at:]), expected[at:], rtol=0, atol=EXACT)

    kv.truncate(0)
    engine.forward(tokens[:100])
    end = end_of(kv)
    engine.forward(tokens[100:180])
    kv.truncate(100, end)
    np.testing.assert_allclose(engine.forward_all(tokens[100:]), expected[100:], rtol=0, atol=EXACT)


@on_engines
def test_saved_state_fits_caches_of_other_sizes(backend: str, engines: Engines) -> None:
    engine, tokens = engines(open_one(backend, "gemma3")), some_tokens(200)
    engine.forward(tokens[:100])
    state = engine.kv.save()
    expected = engine.forward_all(tokens[100:130])
    for options in ({"chunk": 1}, {"chunk": 64}, {"capacity": 130}):
        other = engines(open_one(backend, "gemma3", **options))
        bring_back(other.kv, state)
        np.testing.assert_allclose(other.forward_all(tokens[100:130]), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize("capacity", [24, 300])
def test_plans_count_the_ring_of_onnx(observes: bool, capacity: int, engines: Engines) -> None:
    """The native engine's are counted in test_pass_memory.py."""
    model = open_model(GOLDEN / "gemma3.gguf")
    for dtype in ("f32", "f16"):
        engine = engines(load_engine(model, "onnx", dtype, capacity=capacity, chunk=8, observes=observes))
        counted = find_backend("onnx", model.file, model.spec).footprint(model.spec, engine.config)
        assert (counted.kv, counted.fixed_kv) == (engine.kv.nbytes, engine.kv.fixed)


# Sessions


@pytest.fixture
def sessions(open_session: Callable[..., Session]) -> Callable[..., Session]:
    options = {"backend": "cpu", "kv_dtype": "f32", "max_kv_size": 400, "prefill_step_size": CHUNK}
    return partial(open_session, "gemma3", kv_policy="streaming", **options)


@pytest.mark.parametrize("memory", [None, "16MiB"])
def test_prompt_cache_resumes_where_a_tail_is(
    memory: str | None, sessions: Callable[..., Session], tmp_path: Path
) -> None:
    """The same prompt at once; from the third on, others with the same beginning: the second finds where they part."""
    cache, plain = PromptCache(None if memory else tmp_path, memory=memory), sessions()
    cached, system, reused = sessions(prompt_cache=cache), some_tokens(150, 9), []
    for seed in (1, 1, 2, 3, 3):
        prompt = np.concatenate([system, some_tokens(100, seed)])
        answers = [each.generate(prompt, max_tokens=40, ignore_eos=True) for each in (cached, plain)]
        assert answers[0] == answers[1]
        reused.append(cached.report.tokens.reused)
    assert reused == [0, 192, 0, 128, 192]


def test_windows_in_all_layers_need_their_rows_only() -> None:
    """The plan has 256 rows for 480 tokens, and evictions change nothing."""
    model, tokens = open_model(GOLDEN / "llama-window.gguf"), some_tokens(480)
    expected = load_engine(model, "reference", "f32", capacity=480).forward_all(tokens)
    options: dict[str, Any] = {"backend": "cpu", "kv_dtype": "f32", "threads": 1, "logits_rows": CHUNK}
    with load(model, kv_policy="streaming", expected_tokens=480, prefill_step_size=CHUNK, **options) as session:
        assert session.plan.config.capacity == 256
        parts = []
        for at in range(0, 480, CHUNK):
            assert session.make_room(CHUNK)
            parts.append(session.forward(tokens[at : at + CHUNK], upcoming=CHUNK, every=True).copy())
        np.testing.assert_allclose(np.concatenate(parts), expected, rtol=0, atol=EXACT)


@pytest.mark.parametrize("slack", [200, 4])
def test_turn_is_undone_past_a_ring(
    slack: int, sessions: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its rows, or by a snapshot."""
    monkeypatch.setattr(ring, "SLACK", slack)
    talk, answers = Conversation(sessions()), []
    "".join(talk.say("Hello there", max_tokens=20, ignore_eos=True))
    for _ in range(3):
        answers.append("".join(talk.say("And you?", max_tokens=20, ignore_eos=True)))
        talk.undo()
        assert not talk.replays
    assert len(set(answers)) == 1
