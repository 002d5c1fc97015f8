"""Policies that evict head by head, in sessions on the native engine, beside an oracle that only hides rows."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, Engines, examples, exhaustive, load_engine, open_golden, some_tokens
from heads_oracle import HeadOracle, Twin, follow_evictions, some_rows
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_models import Small, write_small
from test_architectures import require_native

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.reference import learned
from edge.errors import InputError, UnsupportedError
from edge.kv import make_policy
from edge.model.model import Model, open_model
from edge.run.sequences.eviction import keep_heads, view_for
from edge.run.session import Session
from edge.run.starting.loading import load

CHUNK, SINKS = 8, 3
HEAD_POLICIES = (
    "h2o", "tova", "scissorhands:window=6", "snapkv:window=5,kernel=3", "keydiff", "knorm", "kvzap",
    "pyramidkv:window=4,slope=6", "adakv:window=4", "fastgen",
)  # fmt: skip


@pytest.fixture(autouse=True)
def native_here() -> None:
    require_native()


def model_of(name: str) -> Model:
    return open_golden(name).model if name.startswith("llama-gqa") else open_model(GOLDEN / f"{name}.gguf")


# What the engine does


@pytest.mark.parametrize("name", [
    "llama-gqa-tied", "llama-window", "gemma4", *map(exhaustive, ("gemma3", "phi3", "gpt2", "mistral3", "smollm3")),
])  # fmt: skip
def test_heads_keep_and_renumber_their_own_rows(name: str, engines: Engines) -> None:
    """Windows, two rotations, partial rotation and none, temperatures; attention after evictions, too."""
    model = model_of(name)
    native = engines(load_engine(model, "cpu", "f32", chunk=CHUNK, observes=True))
    follow_evictions(native, HeadOracle(model, capacity=128, chunk=CHUNK))


@pytest.mark.parametrize("backend", ["cpu", "onnx"])
def test_unsupported_policies_of_heads_are_refused(backend: str, engines: Engines) -> None:
    engine: Any = engines(load_engine(model_of("llama-gqa-tied"), backend, "f32", chunk=CHUNK, observes=True))
    kv, heads = engine.kv, engine.spec.layers * engine.spec.kv_heads
    engine.forward_all(some_tokens(16))
    assert not kv.attention.any()  # nothing is added up unless it is asked for
    rows = some_rows(kv.head_lengths, 0, alike=backend == "onnx")
    with pytest.raises(InputError, match="heads"):
        kv.keep_heads(rows[:-1])
    with pytest.raises(InputError, match="rows to keep"):
        kv.keep_heads([np.array([16], np.int32)] * heads)
    if backend == "onnx":
        with pytest.raises(UnsupportedError, match="equally many"):
            kv.keep_heads([*rows[:-1], rows[-1][:-1]])
    assert (kv.head_lengths == 16).all()
    kv.keep_heads(rows)
    with pytest.raises(UnsupportedError, match="gaps"):
        kv.keep(np.arange(4, dtype=np.int32), close_gaps=True)
    with pytest.raises(UnsupportedError, match="saved"):
        kv.save()


# Sessions


@lru_cache
def twin_of(policy: str, capacity: int, dtype: str) -> Twin:
    """Loaded once: every example resets it."""
    session = load(
        model_of("llama-gqa-tied"), backend="cpu", kv_policy=policy, sinks=SINKS, max_kv_size=capacity, kv_dtype=dtype,
        threads=1, prefill_step_size=CHUNK, logits_rows=CHUNK,
    )  # fmt: skip
    return Twin(session, tied_oracle())


@lru_cache
def tied_oracle() -> HeadOracle:
    return HeadOracle(model_of("llama-gqa-tied"), capacity=400, chunk=CHUNK)


CHUNKS = st.lists(st.tuples(st.integers(1, CHUNK), st.integers(1, CHUNK)), min_size=1, max_size=25)


@pytest.mark.parametrize(
    ("policy", "dtype"), [*((policy, "f32") for policy in HEAD_POLICIES), ("adakv:window=4", "int8")]
)
@settings(max_examples=examples(6))
@given(capacity=st.sampled_from([16, 23, 40]), chunks=CHUNKS)
@example(capacity=16, chunks=[(8, 8), (8, 8), (8, 1), *[(1, 1)] * 20, (8, 8)])
def test_session_equals_an_oracle_that_masks_rows(
    policy: str, dtype: str, capacity: int, chunks: list[tuple[int, int]]
) -> None:
    """Chunks of any size; what is announced of the next one may be wrong."""
    twin = twin_of(policy, capacity, dtype)
    assert (twin.feed_chunks(chunks) > capacity) == bool(twin.policy.evictions)


def test_h2o_counts_queries_that_saw_row() -> None:
    twin = twin_of("h2o", 40, "f32")
    twin.reset()
    for part in [*np.split(some_tokens(64), 8), *some_tokens(60)[:, None]]:
        twin.feed(part)
        np.testing.assert_array_equal(twin.kv.ages, twin.oracle.rows_of(twin.oracle.seen))
    assert twin.policy.evictions > 5


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


@pytest.mark.parametrize(("policy", "dtype"), [("adakv:window=4", "f16"), ("kvzap", "f16"), ("h2o", "int4")])
def test_eviction_takes_no_more_than_was_counted(policy: str, dtype: str, tmp_path: Path, engines: Engines) -> None:
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
