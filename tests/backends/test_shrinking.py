"""KV caches that become smaller while they are in use: rows stay what they are, and the memory really goes back."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, load_engine, open_golden, require, run_child, some_tokens
from small_models import Small, write_small

from edge.backends.base import Engine
from edge.backends.kv_cache import CapacityError
from edge.backends.llamacpp.engine import LlamaCppEngine
from edge.errors import InputError
from edge.model.model import Model, open_model
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import IntArray

LARGE, SMALL = 600, 240  # rows; llama.cpp allocates 256 at once
ENGINES = [("reference", "f32"), ("llamacpp", "f16"), ("cpu", "int8"), ("cpu", "int4"), ("onnx", "int8")]
EXACT = 1e-5  # of logits whose standard deviation is 3: all but the order of sums is the same
ROUNDED = 8e-2  # llama.cpp sums halves, and rows lie in another order
BY_POLICY = [  # by attention, by heads and by layers
    ("cpu", "h2o"), ("cpu", "adakv:window=4"), ("cpu", "pyramidkv"), ("llamacpp", "h2o"), ("onnx", "h2o"),
]  # fmt: skip


def check_same(one: Engine, other: Engine, tokens: IntArray) -> None:
    error = ROUNDED if isinstance(one, LlamaCppEngine) and one.config.kv_dtype == "f16" else EXACT
    np.testing.assert_allclose(one.forward_all(tokens), other.forward_all(tokens), rtol=0, atol=error)
    np.testing.assert_array_equal(one.kv.positions, other.kv.positions)


@pytest.mark.parametrize(("backend", "kv_dtype", "name"), [
    ("reference", "f32", "llama-window"), ("llamacpp", "f16", "llama-gqa-untied"),
    ("cpu", "int4", "llama-gqa-untied"), ("onnx", "f32", "llama-window"), ("onnx", "int8", "llama-gqa-untied"),
    exhaustive("cpu", "f16", "llama-window"), exhaustive("cpu", "int8", "llama-window"),
])  # fmt: skip
def test_shrinking_keeps_rows_in_use(backend: str, kv_dtype: str, name: str) -> None:
    model, tokens = open_model(GOLDEN / f"{name}.gguf"), some_tokens(LARGE)
    kept = np.flatnonzero(np.random.default_rng(2).random(500) < 0.3).astype(np.int32)
    kept[-1] = 499
    with ExitStack() as stack:
        one, other = (
            stack.enter_context(closing(load_engine(model, backend, kv_dtype, capacity=LARGE))) for _ in range(2)
        )
        before = one.kv.nbytes
        for engine in (one, other):
            engine.forward(tokens[:500])
            engine.kv.keep(kept, close_gaps=True)
        one.kv.shrink(SMALL)
        assert one.kv.capacity == SMALL
        assert one.kv.nbytes <= before * (256 if backend == "llamacpp" else SMALL + 16) / LARGE
        for start in range(0, 40, 8):
            check_same(one, other, tokens[start : start + 8])
        for engine in (one, other):
            engine.kv.keep(np.arange(20, engine.kv.length, 2, dtype=np.int32) | 1, close_gaps=True)
        check_same(one, other, tokens[40:60])
        state = one.kv.save()
        with pytest.raises(CapacityError):
            one.forward(tokens[: one.kv.free + 1])
        for engine in (one, other):
            engine.kv.truncate(0)
            engine.kv.append(state)
        check_same(one, other, tokens[60:90])
        for engine in (one, other):
            engine.kv.truncate(0)
        check_same(one, other, tokens[:SMALL])
        assert one.kv.free == 0


@pytest.mark.parametrize(("backend", "kv_dtype"), ENGINES)
def test_rows_in_use_are_not_given_up(backend: str, kv_dtype: str) -> None:
    with closing(load_engine(open_golden("llama-one-layer").model, backend, kv_dtype, capacity=64)) as engine:
        engine.forward(some_tokens(33))
        for capacity in (0, -1, 32):
            with pytest.raises(InputError, match="33 rows are in use"):
                engine.kv.shrink(capacity)
        for capacity in (100, 64, 33, 50):
            engine.kv.shrink(capacity)
        assert (engine.kv.length, engine.kv.capacity, engine.kv.free) == (33, 33, 0)
        engine.kv.truncate(0)
        engine.kv.shrink(1)
        engine.forward(some_tokens(1))


def _session(model: Model, backend: str, policy: str) -> Session:
    return load(model, backend=backend, kv_policy=policy, max_kv_size=300, prefill_step_size=16, threads=1)


@pytest.mark.parametrize(("backend", "policy"), BY_POLICY)
def test_rows_of_each_head_are_unchanged_by_shrinking(backend: str, policy: str) -> None:
    require(backend)
    error = ROUNDED if backend == "llamacpp" else EXACT
    model, tokens = open_golden("llama-gqa-tied").model, some_tokens(256)
    with _session(model, backend, policy) as one, _session(model, backend, policy) as other:
        for session in (one, other):
            for start in range(0, 256, 16):
                session.forward(tokens[start : start + 16], upcoming=100 if start >= 200 else 16)
            session.shrink(100)
        one.engine.kv.shrink(130)
        assert one.engine.kv.capacity == 130
        for start in (0, 16):
            ours, theirs = (
                session.forward(tokens[start : start + 14], upcoming=500, every=True) for session in (one, other)
            )
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=error)
        other.engine.kv.shrink(130)  # from here on, policies and gaps ask how many rows there are
        for session in (one, other):
            session.shrink(60)
        ours, theirs = (session.forward(tokens[:16], upcoming=30, every=True) for session in (one, other))
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=error)


_GIVE_BACK = """
import json, sys, numpy as np
from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.devices.memory import memory_use, release_free_memory
from edge.model.model import open_model

path, backend, kv_dtype = sys.argv[1:]
model = open_model(path)
config = EngineConfig(4096, 64, kv_dtype, threads=1)
engine = find_backend(backend, model.file, model.spec).load(model.file, model.spec, config)
tokens = np.random.default_rng(1).integers(3, 200, 4096).astype(np.int32)
engine.forward(tokens)
engine.kv.keep(np.arange(4096 - 512, 4096, dtype=np.int32), close_gaps=True)
release_free_memory()
full, nbytes = memory_use().rss, engine.kv.nbytes
engine.kv.shrink(512)
release_free_memory()
print(json.dumps({"fell": full - memory_use().rss, "promised": nbytes - engine.kv.nbytes}))
"""


@pytest.mark.parametrize(
    ("backend", "kv_dtype"), [("cpu", "int8"), ("llamacpp", "f16"), *map(exhaustive, ("cpu", "onnx"), ("f16", "f32"))]
)
def test_memory_really_goes_back(backend: str, kv_dtype: str, tmp_path: Path) -> None:
    require(backend)
    small = Small(layers=2, hidden=64, heads=4, kv_heads=4, head=64, context=4096)
    child = run_child(_GIVE_BACK, write_small(tmp_path / "small.gguf", small), backend, kv_dtype)
    assert child.status == 0, child.errors
    assert child.output["promised"] > 3 << 20
    late = 512 << 10  # by which the kernel's count is wrong, and what was loaded meanwhile
    assert child.output["fell"] >= 0.95 * child.output["promised"] - late
