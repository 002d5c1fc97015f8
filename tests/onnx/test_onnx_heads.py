"""Heads that keep rows of their own in the ONNX engine, beside an oracle that hides rows and the native engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import Engines, exhaustive, load_engine, open_golden, some_tokens
from heads_oracle import EXACT, HeadOracle, assert_same_rows, follow_evictions, some_rows
from test_architectures import open_family, require_native

from edge.backends.onnx.memory import MOST_OBSERVED
from edge.backends.onnx.rows import load_rows, store_rows
from edge.errors import UnsupportedError
from edge.model.model import Model
from edge.run.starting.loading import load
from edge.types import AnyArray

pytest.importorskip("onnxruntime")
CHUNK, MODEL = 8, "llama-gqa-tied"


def onnx_engine(engines: Engines, dtype: str = "f32", model: Model | None = None) -> Any:
    model = model or open_golden(MODEL).model
    return engines(load_engine(model, "onnx", dtype, capacity=128, chunk=CHUNK, observes=True))


def stored(engine: Any) -> AnyArray:
    """Rows as they lie in memory, in their order: [2, layers, KV heads, length, values]."""
    kv = engine.kv
    rows = kv._by_head(kv._lists.physical[:, : kv.length])
    return np.take_along_axis(kv.store.array, rows[None, ..., None], axis=3)


@pytest.mark.parametrize(("name", "votes"), [(MODEL, False), (MODEL, True), ("gemma2", False), ("llama-window", False)])
def test_rows_of_different_heads_are_kept_and_renumbered(name: str, votes: bool, engines: Engines) -> None:
    """Gemma's scores are capped, its layers rotate by different angles. Where all layers have windows, these count
    positions, which differ from head to head."""
    model = open_golden(name).model if name == MODEL else open_family(name).model
    oracle = HeadOracle(model, capacity=128, chunk=CHUNK)
    oracle.votes = votes
    follow_evictions(onnx_engine(engines, model=model), oracle, alike=True)


def test_queries_of_a_long_chunk_are_observed_in_parts(engines: Engines) -> None:
    chunk, model = 2 * MOST_OBSERVED + 6, open_golden(MODEL).model
    engine: Any = engines(
        load_engine(model, "onnx", "f32", capacity=128, chunk=chunk, logits_rows=chunk, observes=True)
    )
    oracle = HeadOracle(model, capacity=128, chunk=chunk)
    for part in (some_tokens(chunk), some_tokens(30, 2)):
        engine.observe(chunk - 3)
        ours, theirs = engine.forward_all(part), oracle.forward_all(part, observed=chunk - 3)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
        assert_same_rows(engine, oracle)


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8", "int4"])
def test_kept_rows_are_bit_equal(dtype: str, engines: Engines) -> None:
    engine = onnx_engine(engines, dtype)
    engine.observe(2)
    engine.forward(some_tokens(50, 1))
    heads = engine.spec.layers * engine.spec.kv_heads
    for again in range(4):
        engine.forward(some_tokens(7, again))
        rows, before = some_rows(engine.kv.head_lengths, 1 + again, alike=True), stored(engine)
        paid, ages = engine.kv.attention, engine.kv.ages
        engine.kv.keep_heads(rows)
        chosen = np.stack(rows).reshape(engine.spec.layers, engine.spec.kv_heads, -1)
        for _ in range(2):
            kept = np.take_along_axis(before, np.broadcast_to(chosen, (2, *chosen.shape))[..., None], axis=3)
            np.testing.assert_array_equal(stored(engine), kept)
            np.testing.assert_array_equal(engine.kv.attention, np.take_along_axis(paid, chosen, axis=2))
            np.testing.assert_array_equal(engine.kv.ages, np.take_along_axis(ages, chosen, axis=2))
            engine.kv.keep_heads([np.arange(engine.kv.length, dtype=np.int32)] * heads)


@pytest.mark.parametrize("dtype", ["int4", exhaustive("int8")])
def test_sinks_are_not_worn_by_thousands_of_evictions(dtype: str, engines: Engines) -> None:
    """Their keys are rotated forward each time, from their first values: rounding would add up otherwise."""
    engine = onnx_engine(engines, dtype)
    tokens = some_tokens(4)
    engine.forward(tokens)
    first = engine.kv.keys(0)[:, :4].copy()
    step = engine.kv.store.scales[0, 0]
    for number in range(2000):
        engine.forward(some_tokens(2, number))
        engine.kv.keep(np.r_[0:4, 5:6].astype(np.int32), close_gaps=True)
    kv = engine.kv
    kv._move_keys(np.arange(4), kv._lists.rope_positions[0, :4], np.arange(4))  # back to where they were
    assert np.abs(kv.keys(0)[:, :4] - first).max() <= 3 * step.max()


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8", "int4"])
def test_stored_rows_round_trip(dtype: str) -> None:
    random = np.random.default_rng(1)
    values = random.uniform(-1, 1, (3, 5, 16)).astype(np.float32)
    scales = np.full((3, 1, 16), 1 / {"int8": 127, "int4": 7}.get(dtype, 1), np.float32)
    once = store_rows(values, scales, dtype)
    loaded = load_rows(once, scales, dtype)
    assert np.abs(loaded - values).max() <= {"f32": 0, "f16": 1e-3, "int8": 0.51 / 127, "int4": 0.51 / 7}[dtype]
    np.testing.assert_array_equal(store_rows(loaded, scales, dtype), once)


@pytest.mark.parametrize("backend", ["onnx", "cpu"])
def test_engine_without_attention_room_raises(backend: str, engines: Engines) -> None:
    engine: Any = engines(load_engine(open_golden(MODEL).model, backend, "f32"))
    with pytest.raises(UnsupportedError, match="observes"):
        engine.observe(1)
    with pytest.raises(UnsupportedError, match="observes"):
        _ = engine.kv.attention


@pytest.mark.parametrize("policy", ["h2o", "tova", "snapkv:window=5,kernel=3", "keydiff", "knorm"])
def test_policies_keep_the_same_rows_on_two_engines(policy: str) -> None:
    require_native()
    kept = {}
    for backend in ("onnx", "cpu"):
        with load(
            open_golden(MODEL).model, backend=backend, kv_policy=policy, max_kv_size=40, kv_dtype="f32", threads=1,
            prefill_step_size=CHUNK, logits_rows=CHUNK, sinks=3,
        ) as session:  # fmt: skip
            kv: Any = session.engine.kv
            kept[backend] = list[AnyArray]()
            for part in [*np.split(some_tokens(120), 15), *some_tokens(60, 2)[:, None]]:
                assert session.make_room(part.size)
                positions = np.broadcast_to(kv.positions, (*kv.head_lengths.shape, kv.length))
                kept[backend].append(positions.reshape(kv.head_lengths.size, kv.length).copy())
                session.forward(part, upcoming=part.size)
                assert kv.length <= kv.capacity
    same = [
        np.isin(one, other).mean()
        for ours, theirs in zip(kept["onnx"], kept["cpu"], strict=True)
        for one, other in zip(ours, theirs, strict=True)
        if one.size
    ]
    assert np.mean(same) >= 0.95
