"""The native engine's own: heads that keep rows of their own, and the attention that rows get."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import Golden, load_engine, open_golden

from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.backends.reference import attention
from edge.backends.tvm.engine import NativeEngine
from edge.errors import InputError, UnsupportedError
from edge.types import FloatArray, IntArray

CHUNK = 8


@pytest.fixture(params=["llama-gqa-tied", "llama-gqa-untied", "llama-rope-scaled"])
def golden(request: pytest.FixtureRequest) -> Golden:
    return open_golden(request.param)


@pytest.fixture
def native(golden: Golden, engines: Callable[[Engine], Engine]) -> NativeEngine:
    """Two threads, float32 throughout."""
    model = golden.model
    config = EngineConfig(128, CHUNK, "f32", threads=2, logits_rows=CHUNK, observes=True)
    engine = engines(find_backend("cpu", model.file, model.spec).load(model.file, model.spec, config))
    assert isinstance(engine, NativeEngine)
    return engine


@pytest.fixture
def oracle(golden: Golden, engines: Callable[[Engine], Engine]) -> Engine:
    return engines(load_engine(golden.model, "reference", "f32", chunk=CHUNK))


@pytest.fixture
def softmaxes(monkeypatch: pytest.MonkeyPatch) -> list[FloatArray]:
    """What the reference engine's softmax gives, call by call: one per layer and chunk."""
    seen: list[FloatArray] = []
    softmax = attention.softmax

    def remember(x: FloatArray) -> FloatArray:
        seen.append(softmax(x))
        return seen[-1]

    monkeypatch.setattr(attention, "softmax", remember)
    return seen


def expected(softmaxes: list[FloatArray], engine: NativeEngine, queries: int) -> FloatArray:
    """Attention of the last `queries` of every chunk, mean over a group's heads, summed: [layers, KV heads, rows]."""
    spec = engine.spec
    total = np.zeros((spec.layers, spec.kv_heads, engine.kv.length), np.float32)
    for call, shares in enumerate(softmaxes):  # [KV heads, group, n, rows]
        total[call % spec.layers, :, : shares.shape[-1]] += shares.mean(axis=1)[:, -queries:].sum(axis=1)
    return total


@pytest.mark.parametrize("queries", [1, 3, CHUNK])
def test_attention_is_what_softmax_gave(
    native: NativeEngine, oracle: Engine, golden: Golden, softmaxes: list[FloatArray], queries: int
) -> None:
    native.observe(queries)
    native.forward_all(golden.tokens)
    oracle.forward_all(golden.tokens)
    np.testing.assert_allclose(native.kv.attention, expected(softmaxes, native, queries), atol=1e-5)


def test_attention_of_single_steps_and_from_zero(
    native: NativeEngine, oracle: Engine, golden: Golden, softmaxes: list[FloatArray]
) -> None:
    native.observe(1)
    native.forward_all(golden.tokens[:30])
    native.kv.clear_attention()
    oracle.forward_all(golden.tokens[:30])
    softmaxes.clear()
    for token in golden.tokens[30:40]:
        native.forward(token[None])
        oracle.forward(token[None])
    np.testing.assert_allclose(native.kv.attention, expected(softmaxes, native, 1), atol=1e-5)


def test_nothing_is_added_up_unless_asked(native: NativeEngine, golden: Golden) -> None:
    native.forward_all(golden.tokens)
    assert not native.kv.attention.any()


def test_engine_without_room_for_attention_says_so(golden: Golden, engines: Callable[[Engine], Engine]) -> None:
    engine = engines(load_engine(golden.model, "cpu", "f32"))
    assert isinstance(engine, NativeEngine)
    with pytest.raises(UnsupportedError, match="observes"):
        engine.observe(1)
    with pytest.raises(UnsupportedError, match="observes"):
        _ = engine.kv.attention


def some_rows(heads: int, length: int, seed: int) -> list[IntArray]:
    """For every head, rows of its own choice and number."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(length // 3, length, heads)
    return [np.sort(rng.choice(length, count, replace=False)).astype(np.int32) for count in counts]


def hide(rows: list[IntArray], length: int, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the reference engine blind to the rows, of the first `length`, that a head does not keep."""
    softmax, calls = attention.softmax, iter(range(1 << 30))

    def blind(scores: FloatArray) -> FloatArray:
        layer, scores = next(calls) % layers, scores.copy()
        for head in range(len(scores)):
            gone = np.setdiff1d(np.arange(length), rows[layer * len(scores) + head])
            scores[head, ..., gone] = -np.inf
        return softmax(scores)

    monkeypatch.setattr(attention, "softmax", blind)


@pytest.mark.parametrize("seed", range(3))
def test_every_head_sees_the_rows_that_it_kept(
    native: NativeEngine, oracle: Engine, golden: Golden, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    spec, length, tokens = native.spec, 40, golden.tokens
    heads = spec.layers * spec.kv_heads
    native.observe(CHUNK)
    for engine in (native, oracle):
        engine.forward_all(tokens[:length])
    attention = native.kv.attention.reshape(heads, -1)
    rows = some_rows(heads, length, seed)
    native.kv.keep_heads(rows)

    positions, kept = native.kv.positions.reshape(heads, -1), native.kv.attention.reshape(heads, -1)
    for head, own in enumerate(rows):
        np.testing.assert_array_equal(positions[head, : own.size], own)
        assert (positions[head, own.size :] == -1).all()
        np.testing.assert_array_equal(kept[head, : own.size], attention[head, own])

    hide(rows, length, spec.layers, monkeypatch)
    answers = oracle.forward_all(tokens[length:])
    np.testing.assert_allclose(native.forward_all(tokens[length:]), answers, atol=1e-3)
    native.kv.truncate(native.kv.length - (64 - length))
    steps = np.stack([native.forward(token[None]).copy() for token in tokens[length:]])
    np.testing.assert_allclose(steps, answers, atol=1e-3)


def test_heads_may_evict_again_and_start_anew(native: NativeEngine, golden: Golden) -> None:
    heads = native.spec.layers * native.spec.kv_heads
    native.forward_all(golden.tokens[:40])
    rows = some_rows(heads, 40, 7)
    native.kv.keep_heads(rows)
    again = [np.arange(0, each.size, 2, dtype=np.int32) for each in rows]
    native.kv.keep_heads(again)
    positions = native.kv.positions.reshape(heads, -1)
    for head, (first, second) in enumerate(zip(rows, again, strict=True)):
        np.testing.assert_array_equal(positions[head, : second.size], first[second])
    native.kv.truncate(0)
    np.testing.assert_allclose(native.forward_all(golden.tokens), golden.logits, atol=1e-3)


def test_what_heads_cannot_do_is_refused(native: NativeEngine, golden: Golden) -> None:
    heads = native.spec.layers * native.spec.kv_heads
    native.forward_all(golden.tokens[:16])
    with pytest.raises(InputError, match="heads"):
        native.kv.keep_heads([np.arange(3, dtype=np.int32)])
    with pytest.raises(InputError, match="rows to keep"):
        native.kv.keep_heads([np.array([16], np.int32)] * heads)
    native.kv.keep_heads(some_rows(heads, 16, 0))
    with pytest.raises(UnsupportedError, match="gaps"):
        native.kv.keep(np.arange(4, dtype=np.int32), close_gaps=True)
    with pytest.raises(UnsupportedError, match="saved"):
        native.kv.save()
