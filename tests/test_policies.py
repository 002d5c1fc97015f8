"""Which rows stay, for every policy that edge knows; and that a session never holds more than its cache."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
from conftest import CAPACITY, SINKS, open_golden
from hypothesis import example, given
from hypothesis import strategies as st

from edge.errors import InputError
from edge.kv import POLICY_NAMES, KVView, make_policy
from edge.session import Session, load
from edge.types import IntArray

EVICTING = tuple(name for name in POLICY_NAMES if make_policy(name).evicts)


@st.composite
def lengths_and_budgets(draw: st.DrawFn) -> tuple[int, int]:
    """More rows than may stay: policies are asked for nothing else."""
    length = draw(st.integers(1, 5000))
    return length, draw(st.integers(0, length - 1))


SINK_COUNTS = st.integers(0, 64)


@pytest.mark.parametrize("name", EVICTING)
@given(lengths_and_budgets(), SINK_COUNTS)
def test_at_most_the_budget_stays_in_order(name: str, sizes: tuple[int, int], sinks: int) -> None:
    length, budget = sizes
    rows = make_policy(name, sinks).rows_to_keep(KVView(length), budget)
    assert rows.dtype == np.int32
    assert rows.ndim == 1
    assert rows.size <= budget
    assert (np.diff(rows) > 0).all()
    assert rows.size == 0 or (rows[0] >= 0 and rows[-1] < length)


@given(lengths_and_budgets(), SINK_COUNTS)
@example((10, 4), 4)
@example((10, 5), 4)
@example((10, 0), 4)
def test_streaming_keeps_the_sinks_and_fills_up_with_the_most_recent(sizes: tuple[int, int], sinks: int) -> None:
    length, budget = sizes
    rows = make_policy("streaming", sinks).rows_to_keep(KVView(length), budget)
    first = min(sinks, budget)
    np.testing.assert_array_equal(rows, [*range(first), *range(length - (budget - first), length)])


@given(lengths_and_budgets())
def test_window_keeps_the_most_recent(sizes: tuple[int, int]) -> None:
    length, budget = sizes
    rows = make_policy("window").rows_to_keep(KVView(length), budget)
    np.testing.assert_array_equal(rows, range(length - budget, length))


@given(lengths_and_budgets())
def test_streaming_without_sinks_is_a_window(sizes: tuple[int, int]) -> None:
    view, budget = KVView(sizes[0]), sizes[1]
    np.testing.assert_array_equal(
        make_policy("streaming", 0).rows_to_keep(view, budget), make_policy("window").rows_to_keep(view, budget)
    )


@given(st.integers(0, 5000))
def test_full_gives_nothing_up(length: int) -> None:
    policy = make_policy("full")
    assert not policy.evicts
    np.testing.assert_array_equal(policy.rows_to_keep(KVView(length), length), range(length))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_policy_has_the_name_it_is_made_by(name: str) -> None:
    assert make_policy(name).name == name


def test_unknown_policies_and_negative_sinks_are_refused() -> None:
    with pytest.raises(InputError, match="choose streaming, window, full"):
        make_policy("h2o")
    with pytest.raises(InputError, match="sinks"):
        make_policy("streaming", -1)


# In a session


@lru_cache
def session_of(policy: str) -> Session:
    """A small session on the reference engine, loaded once: every example resets it."""
    return load(
        open_golden("llama-one-layer").model,
        backend="reference",
        kv_policy=policy,
        sinks=SINKS,
        max_kv_size=CAPACITY,
        threads=1,
    )


CHUNKS = st.lists(st.integers(1, CAPACITY // 2), min_size=1, max_size=12)


@pytest.mark.parametrize("policy", EVICTING)
@given(CHUNKS)
def test_rows_and_incoming_tokens_never_exceed_the_capacity(policy: str, chunks: list[int]) -> None:
    """The loop of prefill and decode, chunk by chunk; `held` is what the cache ought to hold."""
    session, sinks = session_of(policy), SINKS if policy == "streaming" else 0
    session.reset()
    kv, held, seen = session.engine.kv, np.zeros(0, np.int32), 0
    for chunk in chunks:
        before = held
        assert session.make_room(chunk)
        assert kv.length + chunk <= kv.capacity == CAPACITY
        held = _newest(before, kv.length, sinks)
        incoming = np.arange(seen, seen + chunk, dtype=np.int32)
        session.engine.forward(incoming)
        held, seen = np.concatenate([held, incoming]), seen + chunk
        assert kv.length == held.size
        np.testing.assert_array_equal(kv.positions, np.arange(held.size))  # positions are counted in the cache
        np.testing.assert_array_equal(held[:sinks], np.arange(min(sinks, seen)))
    _assert_rows_hold(session, held)


def _newest(held: IntArray, count: int, sinks: int) -> IntArray:
    return held if count == held.size else np.concatenate([held[:sinks], held[held.size - (count - sinks) :]])


def _assert_rows_hold(session: Session, tokens: IntArray) -> None:
    """With one layer, rows depend on their tokens alone: the next logits must be those of a fresh run."""
    after = np.array([7], np.int32)
    if session.engine.kv.length == session.engine.kv.capacity:
        session.engine.kv.truncate(session.engine.kv.length - 1)
        tokens = tokens[:-1]
    logits = session.engine.forward(after).copy()
    session.reset()
    fresh = session.engine.forward(np.concatenate([tokens, after]))
    np.testing.assert_allclose(logits, fresh, rtol=0, atol=1e-3)


@given(CHUNKS)
def test_full_refuses_what_does_not_fit_and_evicts_nothing(chunks: list[int]) -> None:
    session = session_of("full")
    session.reset()
    held = 0
    for chunk in chunks:
        fits = held + chunk <= CAPACITY
        assert session.make_room(chunk) is fits
        if fits:
            session.engine.forward(np.zeros(chunk, np.int32))
            held += chunk
        assert session.engine.kv.length == held


@pytest.mark.parametrize("policy", EVICTING)
def test_more_than_the_whole_cache_never_fits(policy: str) -> None:
    session = session_of(policy)
    session.reset()
    assert not session.make_room(CAPACITY + 1)
    assert session.make_room(CAPACITY)
