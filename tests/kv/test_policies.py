"""Which rows stay, for every policy that edge knows; and that a session never holds more than its cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from conftest import CAPACITY, SINKS, open_golden
from heads_oracle import recent_rows
from hypothesis import example, given
from hypothesis import strategies as st

from edge.errors import InputError
from edge.kv import POLICY_NAMES, KVView, Needs, make_policy
from edge.kv.adakv import AdaKV
from edge.kv.fastgen import FastGen
from edge.kv.h2o import H2O
from edge.kv.keydiff import KeyDiff
from edge.kv.knorm import KNorm
from edge.kv.kvzap import KVzap
from edge.kv.pyramidkv import PyramidKV, pyramid
from edge.kv.scissorhands import Scissorhands
from edge.kv.snapkv import SnapKV
from edge.kv.tova import TOVA
from edge.kv.window import Window
from edge.options import Options
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray, IntArray

STREAMING = ("streaming", "window")  # the same rows for all heads, by age alone
KEEPING = tuple(name for name in POLICY_NAMES if not make_policy(name).evicts)
HEAD_POLICIES = tuple(name for name in POLICY_NAMES if make_policy(name).needs.looks)
UNEVEN_POLICIES = tuple(name for name in HEAD_POLICIES if make_policy(name).needs.uneven != "token")
EVEN_POLICIES = tuple(name for name in HEAD_POLICIES if name not in UNEVEN_POLICIES)


def test_every_policy_has_a_test() -> None:
    assert {*STREAMING, *HEAD_POLICIES, *KEEPING} == set(POLICY_NAMES)


@st.composite
def lengths_and_budgets(draw: st.DrawFn) -> tuple[int, int]:
    """More rows than may stay: policies are asked for nothing else."""
    length = draw(st.integers(1, 5000))
    return length, draw(st.integers(0, length - 1))


def assert_rows(rows: IntArray, length: int, budget: int) -> None:
    assert rows.dtype == np.int32
    assert rows.ndim == 1
    assert rows.size <= budget
    assert (np.diff(rows) > 0).all()
    assert rows.size == 0 or (rows[0] >= 0 and rows[-1] < length)


@given(lengths_and_budgets(), st.integers(0, 64))
@example((10, 4), 4)
@example((10, 5), 4)
@example((10, 0), 4)
def test_streaming_keeps_sinks_and_most_recent(sizes: tuple[int, int], sinks: int) -> None:
    """A window none but the most recent."""
    length, budget = sizes
    for policy, first in ((make_policy("streaming", sinks), min(sinks, budget)), (make_policy("window"), 0)):
        rows = policy.rows_to_keep(KVView(length), budget)
        np.testing.assert_array_equal(rows, [*range(first), *range(length - (budget - first), length)])


@pytest.mark.parametrize("name", KEEPING)
@given(st.integers(0, 5000))
def test_full_evicts_no_rows(name: str, length: int) -> None:
    policy = make_policy(name)
    assert not policy.evicts
    np.testing.assert_array_equal(policy.rows_to_keep(KVView(length), length), range(length))


@pytest.mark.parametrize(("text", "says"), [
    ("H2O", "unknown KV policy 'H2O': choose auto, streaming, window, full, h2o"), ("", "unknown KV policy ''"),
    ("streaming:sinks=-1", "--sinks must be 0 or more, not -1"),
    *((f"quest:rows={each}", f"rows must be from 128 to {1 << 30}, not {each}") for each in (100, 10**21)),
    ("quest:sinks=4", "has no option 'sinks': choose rows"),
    ("full:sinks=4", "has no option 'sinks': it has none"), ("full:", "has no option ''"),
    ("h2o:", "has no option '': choose sinks, recent"), ("h2o:decay=1", "has no option 'decay': choose sinks, recent"),
    ("h2o:recent", "recent must be a number, not ''"), ("h2o:recent=much", "recent must be a number, not 'much'"),
    ("h2o:recent=1.5", "from 0 to 1, not 1.5"), ("h2o:recent=nan", "from 0 to 1, not nan"),
    ("keydiff:recent=-0.1", "from 0 to 1"), ("kvzap:floor=-1", "floor is a share"),
    ("knorm:sinks=1.5", "sinks must be a number, not '1.5'"),
    ("tova:recent=0.5", "has no option 'recent': choose sinks"), ("snapkv:window=0", "window must be 1 or more, not 0"),
    ("snapkv:window=4,kernel=4", "kernel must be an odd number, not 4"),
    ("snapkv:kernel=-1", "kernel must be an odd number"),
])  # fmt: skip
def test_unknown_policies_raise_one_line(text: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        make_policy(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pinned_rows_are_sinks_for_any_text() -> None:
    assert make_policy("snapkv:window=16,kernel=5", 9) == SnapKV(sinks=9, window=16, kernel=5)
    assert make_policy("h2o:sinks=2,recent=0.25", 9) == H2O(sinks=2, recent=0.25)
    assert make_policy("h2o:sinks=2", 4, keep=30) == H2O(sinks=30)
    assert make_policy("h2o:sinks=40", 4, keep=30) == H2O(sinks=40)
    assert make_policy("window", 4) == Window(sinks=0)  # the control
    assert make_policy("window", 4, keep=30) == Window(sinks=30)
    assert make_policy("full", 4, keep=30) == make_policy("full")
    with pytest.raises(InputError, match="--keep must be 0 or more, not -1"):
        make_policy("streaming", 4, keep=-1)


# Head by head


Shown = tuple[KVView, int]  # a view with all that a policy may ask for, and a budget


@st.composite
def heads(draw: st.DrawFn) -> Shown:
    """Heads of any lengths, with scores that may tie and keys that may be zero."""
    shape = draw(st.tuples(st.integers(1, 2), st.integers(1, 3)))
    count = shape[0] * shape[1]
    lengths = np.array(draw(st.lists(st.integers(0, 60), min_size=count, max_size=count)), np.int32).reshape(shape)
    lengths.flat[draw(st.integers(0, count - 1))] = draw(st.integers(1, 60))
    length = int(lengths.max())
    random = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    levels = draw(st.sampled_from([0, 1, 3, 1000]))  # 0: nothing was observed
    used = np.arange(length) < lengths[..., None]
    attention = np.where(used, random.integers(0, levels + 1, used.shape) / 7, 0).astype(np.float32)
    ages = np.where(used, np.sort(random.integers(1, 500, used.shape))[..., ::-1], 0).astype(np.int32)
    keys = random.standard_normal((*used.shape, 8)) * used[..., None] * random.integers(0, 3, (*used.shape, 1))
    parts = [each.astype(np.float32).__getitem__ for each in (keys, random.random(used.shape) * used)]
    return KVView(length, lengths, attention, ages, *parts), draw(st.integers(0, length - 1))


POLICIES = {
    "h2o": st.builds(H2O, sinks=st.integers(0, 6), recent=st.floats(0, 1)),
    "tova": st.builds(TOVA, sinks=st.integers(0, 6)),
    "scissorhands": st.builds(Scissorhands, sinks=st.integers(0, 6), recent=st.floats(0, 1), window=st.integers(1, 12)),
    "snapkv": st.builds(
        SnapKV, sinks=st.integers(0, 6), window=st.integers(1, 12), kernel=st.sampled_from([1, 3, 7, 101])
    ),
    "keydiff": st.builds(KeyDiff, sinks=st.integers(0, 6), recent=st.floats(0, 1)),
    "knorm": st.builds(KNorm, sinks=st.integers(0, 6), recent=st.floats(0, 1)),
    "kvzap": st.builds(KVzap, sinks=st.integers(0, 6), recent=st.floats(0, 1), floor=st.floats(0, 1)),
    "pyramidkv": st.builds(PyramidKV, sinks=st.integers(0, 6), window=st.integers(1, 12), slope=st.floats(1, 100)),
    "adakv": st.builds(AdaKV, sinks=st.integers(0, 6), window=st.integers(1, 12), floor=st.floats(0, 1)),
    "fastgen": st.builds(FastGen, sinks=st.integers(0, 6), recent=st.floats(0, 1)),
}


def naive_scores(policy: Any, attention: FloatArray, ages: IntArray, keys: FloatArray) -> list[float]:
    """Of the rows of one head, as the papers have them."""
    if policy.name == "h2o":
        return [float(paid) / int(age) for paid, age in zip(attention, ages, strict=True)]
    if policy.name in ("tova", "scissorhands"):
        return [float(paid) for paid in attention]
    if policy.name == "snapkv":
        side = policy.kernel // 2
        return [float(max(attention[max(0, row - side) : row + side + 1])) for row in range(attention.size)]
    norms = [float(np.sqrt(sum(float(each) ** 2 for each in key))) for key in keys]
    if policy.name == "knorm":
        return [-norm for norm in norms]
    directions = [key / norm if norm else key for key, norm in zip(keys, norms, strict=True)]
    mean = sum(directions) / max(1, len(directions))
    return [-float(np.dot(direction, mean)) for direction in directions]


@pytest.mark.parametrize("name", EVEN_POLICIES)
@given(st.data(), heads())
def test_heads_keep_sinks_recent_rows_and_highest_scores(name: str, data: st.DataObject, shown: Shown) -> None:
    policy, (view, budget) = data.draw(POLICIES[name]), shown
    with np.errstate(divide="raise", invalid="raise"):
        chosen = policy.rows_to_keep(view, budget)
    assert len(chosen) == view.lengths.size
    sinks = min(policy.sinks, budget)
    recent = min(recent_rows(policy, budget), budget - sinks)
    for at, rows in zip(np.ndindex(view.lengths.shape), chosen, strict=True):
        length = int(view.lengths[at])
        assert_rows(rows, length, budget)
        assert rows.size == min(budget, length)
        kept = set(rows.tolist())
        protected = {*range(min(sinks, length)), *range(max(0, length - recent), length)}
        assert protected <= kept
        of_rows = (each[:length] for each in (view.attention[at], view.ages[at], view.keys(at[0])[at[1]]))
        scores = naive_scores(policy, *of_rows)
        worst = min((scores[row] for row in kept - protected), default=np.inf)
        best = max((scores[row] for row in set(range(length)) - kept), default=-np.inf)
        assert best <= worst + 1e-5


@pytest.mark.parametrize("name", UNEVEN_POLICIES)
@given(st.data(), heads(), st.integers(1, 3))
def test_uneven_heads_share_budget(name: str, data: st.DataObject, shown: Shown, longest: int) -> None:
    policy, (view, budget) = data.draw(POLICIES[name]), shown
    view = replace(view, longest=budget * longest)
    with np.errstate(divide="raise", invalid="raise"):
        chosen = policy.rows_to_keep(view, budget)
    assert len(chosen) == view.lengths.size
    assert sum(rows.size for rows in chosen) <= budget * view.lengths.size
    for length, rows in zip(view.lengths.reshape(-1).tolist(), chosen, strict=True):
        assert_rows(rows, length, min(length, view.longest))
        sinks = min(policy.sinks, rows.size)
        np.testing.assert_array_equal(rows[:sinks], np.arange(sinks))
        if rows.size > sinks:
            none_recent = policy.name == "fastgen" or (policy.name == "kvzap" and not policy.newest(budget))
            assert rows[-1] == length - 1 or none_recent


@pytest.mark.parametrize("name", [name for name in POLICY_NAMES if name not in KEEPING])
@given(st.data(), heads(), st.integers(1, 3))
def test_pinned_rows_stay_in_every_head(name: str, data: st.DataObject, shown: Shown, longest: int) -> None:
    """--keep: the rows of a system prompt outlive every eviction that leaves room for them, by any policy."""
    keep = data.draw(st.integers(0, shown[1]))
    view, budget = replace(shown[0], longest=shown[1] * longest), shown[1]
    rows = make_policy(name, data.draw(st.integers(0, 4)), keep).rows_to_keep(view, budget)
    heads = [rows] * view.lengths.size if isinstance(rows, np.ndarray) else rows
    lengths = np.full_like(view.lengths, view.length) if isinstance(rows, np.ndarray) else view.lengths
    for length, kept in zip(lengths.reshape(-1).tolist(), heads, strict=True):
        np.testing.assert_array_equal(kept[: min(keep, length)], np.arange(min(keep, length)))
    assert sum(each.size for each in heads) <= budget * len(heads)


@given(st.integers(1, 40), st.integers(0, 600), st.integers(0, 600), st.floats(1, 100), st.integers(0, 3))
def test_pyramid_has_same_total(layers: int, mean: int, window: int, slope: float, most: int) -> None:
    window = min(window, mean)
    rows = pyramid(layers, mean, window, slope, mean * (1 + most))
    assert mean * layers - layers < rows.sum() <= mean * layers
    assert (np.diff(rows) <= 0).all()
    assert rows[-1] >= window
    assert rows[0] <= mean * (1 + most)


# In a session


@lru_cache
def session_of(policy: str, keep: int = 0) -> Session:
    """A small session on the reference engine, loaded once: every example resets it."""
    return load(
        open_golden("llama-one-layer").model,
        backend="reference",
        kv_policy=policy,
        sinks=SINKS,
        keep=keep,
        max_kv_size=CAPACITY,
        threads=1,
    )


CHUNKS = st.lists(st.integers(1, CAPACITY // 2), min_size=1, max_size=12)


@pytest.mark.parametrize("keep", [0, 12])
@pytest.mark.parametrize("policy", STREAMING)
@given(CHUNKS)
def test_rows_and_incoming_tokens_never_exceed_capacity(policy: str, keep: int, chunks: list[int]) -> None:
    """The loop of prefill and decode, chunk by chunk; `held` is what the cache ought to hold."""
    session, sinks = session_of(policy, keep), max(keep, SINKS if policy == "streaming" else 0)
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


# A caller's own


@dataclass(frozen=True)
class Newest:
    """The first rows, and the newest."""

    sinks: int = 2
    name = "newest"
    evicts = True
    close_gaps = False
    needs = Needs()

    def rows_to_keep(self, view: KVView, budget: int) -> IntArray:
        kept = [*range(self.sinks), *range(view.length - budget + self.sinks, view.length)]
        return np.array(kept, np.int32)


def test_callers_policy_evicts() -> None:
    model = open_golden("llama-one-layer").model
    with load(model, kv_policy=Newest(), max_kv_size=CAPACITY, keep=5, backend="reference") as session:
        session.generate("a" * 3 * CAPACITY, raw=True, max_tokens=4, ignore_eos=True)
        assert session.report.kv.policy == session.plan.to_dict()["kv_policy"] == "newest"
        assert session.report.kv.evicted > CAPACITY
        assert make_policy(session.plan.kv_policy, keep=7) == Newest(sinks=7)


@pytest.mark.parametrize(("policy", "says"), [
    (Newest, "is a class: give an object of it"), (5, "has no name"),
    (H2O(), "the name of a KV policy of your own must not be edge's, as 'h2o' is"),
])  # fmt: skip
def test_invalid_policy_objects_are_refused(policy: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Options(kv_policy=policy)
