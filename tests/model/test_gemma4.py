"""Gemma 4: layers of several sizes, rows of earlier layers, vectors of each token for every layer."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, Engines, load_engine
from fallbacks import open_fallback
from test_gguf_file import GGUF, U32

from edge.backends import engine_named
from edge.converters.calibrate import State, Walk
from edge.errors import UnsupportedError
from edge.model.model import open_model

FILE = GOLDEN / "gemma4.gguf"
GPU = f"gpu@{SOME_GPU}"
EXACT = 2e-4


@pytest.mark.parametrize(("close_gaps", "backend"), [
    (False, "cpu"), (True, "cpu"), (True, "onnx"), (True, "onnx@cpu-static"),
    *(pytest.param(each, GPU, marks=pytest.mark.exhaustive) for each in (False, True)),
])  # fmt: skip
def test_rings_hold_the_windows_rows(close_gaps: bool, backend: str, engines: Engines) -> None:
    """Layers that read the rows of rings find them wherever these move."""
    model = open_fallback("gemma4")[0]
    tokens, found = np.random.default_rng(2).integers(3, model.spec.vocab, 300).astype(np.int32), []
    for name in ("reference", backend):
        engine = engines(load_engine(model, name, "f32", capacity=256, chunk=24))
        first = engine.forward_all(tokens[:240]).copy()
        engine.kv.keep(np.r_[0:4, 130:240].astype(np.int32), close_gaps=close_gaps)
        found.append(np.concatenate([first, engine.forward_all(tokens[240:])]))
    # A row of these tokens is ill-conditioned: ONNX Runtime 1.32 adds it up in another order.
    np.testing.assert_allclose(*found, rtol=0, atol=(5 if "onnx" in backend else 2) * EXACT)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [("rope.dimension_count_swa", 8, "rotates 8 of 16"), ("attention.shared_kv_layers", 4, "share them")],
)
def test_other_gemma4_forms_run_on_llama_cpp(key: str, value: int, why: str, tmp_path: Path) -> None:
    file = GGUF.read(FILE)
    file.metadata[f"gemma4.{key}"] = (U32, value)
    model = open_model(file.write(tmp_path / "model.gguf"))
    assert model.spec.network is None
    with pytest.raises(UnsupportedError, match="models run on"):
        engine_named("reference").check_supported(model.file, model.spec)


def test_calibration_walk_keeps_sequences_apart() -> None:
    """Layers read the rows of their own sequence, of the state that ran."""
    model, tokens, _ = open_fallback("gemma4")
    parts = np.stack([tokens[:30], tokens[30:60]])
    walk = Walk(model.file, model.spec, parts)
    for layer in range(model.spec.layers):
        other = State.joined([walk.state, State(walk.hidden[::-1], walk.state.rows)])
        before, walk.state = walk.state, other
        deque(walk.layer(layer), maxlen=0)
        first = walk.state.split(2)[0]
        walk.state = before
        deque(walk.layer(layer), maxlen=0)
        np.testing.assert_allclose(first.hidden, walk.hidden, rtol=0, atol=1e-5)
    for found, part in zip(np.split(walk.finish(), 2), parts, strict=True):
        engine = load_engine(model, "reference", "f32", chunk=24)
        np.testing.assert_allclose(walk.logits_of(found), engine.forward_all(part), rtol=0, atol=1e-4)
