"""Gemma 4: layers of several sizes, rows of earlier layers, vectors of each token for every layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from fallbacks import open_fallback
from test_gguf_file import GGUF, U32

import edge
from edge.backends import engine_named
from edge.backends.base import Engine
from edge.converters.calibrate import Walk
from edge.errors import UnsupportedError
from edge.model.model import open_model
from edge.options import Options
from edge.plan.plan import make_plan
from edge.run.session import load
from edge.sampling import SamplingParams
from edge.types import FloatArray, IntArray

FILE = GOLDEN / "gemma4.gguf"
OURS = ("reference",)
EXACT, GELU = 2e-4, 1e-2  # llama.cpp looks gelu up in a table of float16

each_engine = pytest.mark.parametrize("backend", OURS)


def logits_of(engine: Engine, tokens: IntArray, pieces: list[int]) -> FloatArray:
    parts = np.split(tokens, np.cumsum(pieces)[:-1])
    return np.concatenate([engine.forward_all(part).copy() for part in parts])


def test_the_header_says_which_layers_share_rows() -> None:
    network = open_fallback("gemma4")[0].spec.network
    assert network is not None
    cores = [core for core in network.attention if core]
    assert [(core.head_dim, core.window, core.rows_of) for core in cores] == [
        (16, 20, None), (32, 0, None), (16, 20, 0), (32, 0, 1),
    ]  # fmt: skip
    assert network.rowless == (2, 3)
    assert network.row_values == open_fallback("gemma4")[0].spec.kv_values


@each_engine
def test_logits_are_those_of_transformers(backend: str, engines: Callable[[Engine], Engine]) -> None:
    model, tokens, expected = open_fallback("gemma4")
    engine = engines(load_engine(model, backend, "f32", chunk=24))
    for pieces in ([64], [40, 1, 1, 22], [1] * 64):
        engine.kv.truncate(0)
        found = logits_of(engine, tokens, pieces)[-len(expected) :]
        np.testing.assert_allclose(found, expected, rtol=0, atol=EXACT)


@each_engine
@pytest.mark.parametrize("close_gaps", [False, True])
def test_layers_without_rows_see_what_was_evicted(
    backend: str, close_gaps: bool, engines: Callable[[Engine], Engine]
) -> None:
    model, tokens, _ = open_fallback("gemma4")
    found = []
    for name in (backend, "llamacpp"):
        engine = engines(load_engine(model, name, "f32", chunk=24))
        engine.forward(tokens[:40])
        engine.kv.keep(np.r_[0:4, 12:40].astype(np.int32), close_gaps=close_gaps)
        found.append(engine.forward_all(tokens[40:60]).copy())
    np.testing.assert_allclose(*found, rtol=0, atol=GELU)


@each_engine
def test_rows_return(backend: str, engines: Callable[[Engine], Engine]) -> None:
    model, tokens, _ = open_fallback("gemma4")
    engine, other = (engines(load_engine(model, backend, "f32", chunk=24)) for _ in range(2))
    engine.forward(tokens[:40])
    saved = engine.kv.save()
    expected = engine.forward_all(tokens[40:50]).copy()
    engine.kv.truncate(40)
    np.testing.assert_array_equal(engine.forward_all(tokens[40:50]), expected)
    other.kv.append(saved)
    np.testing.assert_array_equal(other.forward_all(tokens[40:50]), expected)


@each_engine
@pytest.mark.parametrize("policy", ["streaming", "window"])
def test_a_session_writes_past_its_cache(backend: str, policy: str) -> None:
    with load(FILE, backend=backend, max_kv_size=48, kv_policy=policy) as session:
        session.generate("once upon a time " * 10, max_tokens=60, sampling=SamplingParams(temperature=0), raw=True)
        report = session.report
    assert report is not None
    assert report.kv.evicted > 0


@each_engine
def test_the_plan_counts_the_rows_that_there_are(backend: str, engines: Callable[[Engine], Engine]) -> None:
    model = open_fallback("gemma4")[0]
    plan = make_plan(model.spec, engine_named(backend), Options(max_kv_size=64, kv_dtype="f32"))
    engine = engines(engine_named(backend).load(model.file, model.spec, plan.config))
    assert plan.bytes.kv == engine.kv.nbytes


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("rope.dimension_count_swa", 8, "rotates 8 of 16"), ("attention.shared_kv_layers", 4, "share them")],
)
def test_other_forms_are_left_to_llama_cpp(key: str, value: int, why: str, tmp_path: Path) -> None:
    file = GGUF.read(FILE)
    file.metadata[f"gemma4.{key}"] = (U32, value)
    model = open_model(file.write(tmp_path / "model.gguf"))
    assert model.spec.network is None
    with pytest.raises(UnsupportedError, match="models run on"):
        engine_named("reference").check_supported(model.file, model.spec)


def test_what_cannot_be_done_yet_is_refused() -> None:
    model, tokens, _ = open_fallback("gemma4")
    with pytest.raises(UnsupportedError, match="cannot be calibrated yet"):
        Walk(model.file, model.spec, tokens[None])
    with pytest.raises(UnsupportedError, match="cannot be exported: the C runtime of apps does not run"):
        edge.export(model, "unused")
