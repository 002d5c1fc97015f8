"""Gemma 4: layers of several sizes, rows of earlier layers, vectors of each token for every layer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, load_engine, on_gpu
from fallbacks import logits_of, open_fallback
from small_models import NUMBERS, random_quants
from test_gguf_file import GGUF, U32

from edge.backends import engine_named
from edge.backends.base import Engine, EngineConfig
from edge.converters.calibrate import State, Walk
from edge.errors import UnsupportedError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.model.known import KnownModel, outline_model
from edge.model.model import open_model
from edge.model.reader import read_spec
from edge.model.spec import ModelSpec
from edge.options import Options
from edge.plan.plan import make_plan
from edge.types import FloatArray

FILE = GOLDEN / "gemma4.gguf"
GPU = f"gpu@{SOME_GPU}"
EXACT, GELU = 2e-4, 1e-2  # llama.cpp looks gelu up in a table of float16

_CLOSE = {"f32": 0.9999, "f16": 0.99, "int8": 0.98, "int4": 0.85}  # correlations that llama.cpp has with such rows


WIDE = KnownModel(
    "wide", "", "", 0, "", "gemma4", {
        "block_count": 6, "embedding_length": 256, "feed_forward_length": [256] * 3 + [512] * 3, "context_length": 512,
        "vocab_size": 272, "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 128,
        "attention.value_length": 128, "attention.key_length_swa": 64, "attention.value_length_swa": 64,
        "attention.sliding_window": 20, "attention.shared_kv_layers": 3,
        "attention.sliding_window_pattern": [True, True, False] * 2, "embedding_length_per_layer_input": 64,
        "rope.dimension_count": 128, "rope.dimension_count_swa": 64, "final_logit_softcapping": 5.0,
    }, factors=("rope_freqs",),
)  # fmt: skip

WITH_EXPERTS = replace(
    WIDE, figures=WIDE.figures | {
        "expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 256,
        "embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0,
        "attention.head_count_kv": [2, 2, 1] * 2,
    },
)  # fmt: skip


def write_wide(
    path: Path, mixture: str, model: KnownModel = WIDE, draw: Callable[[tuple[int, int], int], FloatArray] | None = None
) -> tuple[GGUFFile, ModelSpec]:
    """Two KV heads, sizes of whole blocks of any type, and layers that read the rows of the second or third. draw:
    makes matrices, [rows, columns], from a seed."""
    file = outline_model(model, mixture, path, loadable=True)
    with path.open("r+b") as out:
        for seed, info in enumerate(file.tensors.values()):
            random, columns = np.random.default_rng(seed), info.shape[0]
            if info.name == "rope_freqs.weight":
                values = np.where(np.arange(columns) < columns // 4, 1, 1e30)
            elif len(info.shape) == 1:
                values = 1 + 0.2 * random.standard_normal(columns)
            elif draw:
                values = draw((info.rows, columns), seed)
            else:
                values = 1.2 / np.sqrt(columns) * random.standard_normal((info.rows, columns))
            if info.type in ("F32", "F16"):
                raw = values.astype("<f4" if info.type == "F32" else "<f2")
            elif info.type in NUMBERS:
                raw = random_quants(info.type, info.rows, columns, 1.2 / np.sqrt(columns), seed)
            out.seek(info.offset)
            out.write(raw.tobytes())
    file = read_gguf(path)
    return file, read_spec(file)


def test_header_says_which_layers_share_rows() -> None:
    network = open_fallback("gemma4")[0].spec.network
    cores = [core for core in network.attention if core]
    assert [(core.head_dim, core.window, core.rows_of) for core in cores] == [
        (16, 20, None), (32, 0, None), (16, 20, 0), (32, 0, 1),
    ]  # fmt: skip
    assert network.rowless == (2, 3)
    assert network.row_values == open_fallback("gemma4")[0].spec.kv_values


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mixture", "dtype", "backend", "model"),
    [
        ("Q4_0", "f16", "cpu", WIDE), ("Q4_K_M", "f32", "cpu", WIDE), ("Q4_0", "int8", "cpu", WIDE),
        ("Q8_0", "int4", "cpu", WIDE), ("Q4_K_M", "f32", "gpu", WIDE), ("Q4_0", "int8", "gpu", WIDE),
        *((mixture, "f16", "onnx", WIDE) for mixture in ("Q8_0", "Q4_0")),
        ("Q4_K_M", "f32", "cpu", WITH_EXPERTS), ("Q4_0", "f16", "cpu", WITH_EXPERTS),
    ],
)  # fmt: skip
def test_quantized_models(
    mixture: str, dtype: str, backend: str, model: KnownModel, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    file, spec = write_wide(tmp_path / "model.gguf", mixture, model)
    tokens = np.random.default_rng(3).integers(3, spec.vocab, 60).astype(np.int32)
    with on_gpu(SOME_GPU) if backend == "gpu" else nullcontext():
        oracle, ours = (
            engines(engine_named(name).load(file, spec, EngineConfig(128, 24, each, 1, logits_rows=24)))
            for name, each in (("reference", "f32"), (backend, dtype))
        )
    expected = logits_of(oracle, tokens, [60])
    for pieces in ([60], [40, 1, 19], [1] * 60):
        found = logits_of(ours, tokens, pieces)
        if dtype == "f32":
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > _CLOSE[dtype]


@pytest.mark.parametrize(("close_gaps", "backend"), [
    (False, "cpu"), (True, "cpu"), (True, "onnx"), (True, "onnx@cpu-static"),
    *(pytest.param(each, GPU, marks=pytest.mark.exhaustive) for each in (False, True)),
])  # fmt: skip
def test_rings_hold_the_windows_rows(close_gaps: bool, backend: str, engines: Callable[[Engine], Engine]) -> None:
    """Layers that read the rows of rings find them wherever these move."""
    model = open_fallback("gemma4")[0]
    tokens, found = np.random.default_rng(2).integers(3, model.spec.vocab, 300).astype(np.int32), []
    for name in ("reference", backend):
        engine = engines(load_engine(model, name, "f32", capacity=256, chunk=24))
        first = engine.forward_all(tokens[:240]).copy()
        engine.kv.keep(np.r_[0:4, 130:240].astype(np.int32), close_gaps=close_gaps)
        found.append(np.concatenate([first, engine.forward_all(tokens[240:])]))
    np.testing.assert_allclose(*found, rtol=0, atol=2 * EXACT)


@pytest.mark.parametrize("backend", ["reference", "onnx", pytest.param("cpu", marks=pytest.mark.exhaustive)])
def test_plan_counts_rows_that_there_are(backend: str, engines: Callable[[Engine], Engine]) -> None:
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


def test_walk_runs_sequences_apart() -> None:
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
