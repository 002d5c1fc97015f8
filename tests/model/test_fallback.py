"""Architectures that llama.cpp alone runs: logits are transformers', figures llama.cpp's own, promises kept."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, run_child
from fallbacks import FALLBACKS, open_fallback, write_undescribed
from test_gguf_file import GGUF, I32, U32

from edge import load
from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.llamacpp import ENGINE as LLAMACPP
from edge.backends.llamacpp.library import is_installed, library
from edge.backends.llamacpp.trial import try_header
from edge.errors import InputError, UnsupportedError
from edge.model.model import open_model
from edge.model.tensors import find_network
from edge.options import Options
from edge.plan.plan import make_plan

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs llama-cpp-python")
RECURRENT = (
    "falcon-h1", "falcon-mamba", "granitehybrid", "jamba", "kimi-linear", "lfm2", "lfm2moe", "ling", "mamba",
    "nemotron_h", "qwen35", "qwen35moe",
)  # fmt: skip

each_model = pytest.mark.parametrize("name", FALLBACKS)


@each_model
def test_bytes_match_llama_cpp(name: str) -> None:
    model, _, _ = open_fallback(name)
    spec, trial = model.spec, try_header(model.file, model.spec)
    assert spec.network is not None  # our own engines run these, too
    assert not spec.proven
    assert spec.kv_values_per_row == trial.flash.row_values
    assert spec.recurrent == trial.recurrent == (name in RECURRENT)
    assert spec.state_bytes <= trial.state_bytes <= spec.state_bytes + 2 * 5300  # its log says 0.01 MiB
    windows = {window for window in spec.windows if window}
    assert not windows or windows == {trial.window}
    flash = trial.flash  # sizes between those that were tried
    assert flash.compute_bytes(256, 16) == flash.compute[0][1]
    assert flash.compute[0][1] < flash.compute_bytes(256, 100) < flash.compute_bytes(300, 200) < flash.compute[1][2]
    assert flash.compute_bytes(65536, 1024) > flash.compute[2][2]


@pytest.mark.parametrize("name", ["gpt-oss", "qwen35"])
def test_policy_is_full_without_evictable_rows(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, _, _ = open_fallback(name)
    backend = find_backend("llamacpp", model.file, model.spec)
    with caplog.at_level(logging.WARNING, "edge"):
        plan = make_plan(model.spec, backend, Options(max_kv_size=64))
    assert plan.kv_policy == "full"
    assert "stops where the cache is full" in caplog.text
    with pytest.raises(UnsupportedError, match="use full"):
        make_plan(model.spec, backend, Options(kv_policy="h2o"))


def test_auto_takes_llama_cpp_or_says_why_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = open_model(write_undescribed(tmp_path / "m.gguf"))
    with caplog.at_level(logging.WARNING, "edge"):
        assert find_backend("auto", model.file, model.spec) is LLAMACPP
    assert "xverse models run on llama.cpp only" in caplog.text
    assert model.spec.kv_values == open_model(GOLDEN / "llama-gqa-tied.gguf").spec.kv_values


def test_architecture_without_cores_is_refused_by_name(tmp_path: Path) -> None:
    model = open_model(write_undescribed(tmp_path / "m.gguf"))
    with pytest.raises(UnsupportedError, match="own engines lack norms of whole rows"):
        find_network(replace(model.spec, architecture="olmo2"))

    model = open_model(write_undescribed(tmp_path / "m.gguf", "nobodys"))
    with pytest.raises(UnsupportedError, match="unknown model architecture: 'nobodys'"):
        find_backend("auto", model.file, model.spec)


def test_aborts_of_llama_cpp_are_errors(tmp_path: Path) -> None:
    file = GGUF.read(GOLDEN / "nemotron_h.gguf")
    file.metadata["nemotron_h.expert_group_count"] = (U32, 1)  # groups without experts
    model = open_model(file.write(tmp_path / "header.gguf"))
    with pytest.raises(UnsupportedError, match="GGML_ASSERT"):
        find_backend("llamacpp", model.file, model.spec)

    file = GGUF.read(GOLDEN / "qwen35.gguf")
    file.metadata["qwen35.rope.dimension_sections"] = (I32, -1)  # it aborts when it rotates
    model = open_model(file.write(tmp_path / "pass.gguf"))
    backend = find_backend("llamacpp", model.file, model.spec)
    with pytest.raises(UnsupportedError, match="GGML_ASSERT"):
        backend.load(model.file, model.spec, EngineConfig(256, 16, "f16", 1))


def test_layers_on_gpu_need_llama_cpp_that_can() -> None:
    model, tokens, expected = open_fallback("qwen3moe")
    if library().llama_supports_gpu_offload():
        pytest.skip("this llama.cpp has GPU support")
    with pytest.raises(UnsupportedError, match="with GPU support"):
        make_plan(model.spec, LLAMACPP, Options(gpu_layers=1))
    with pytest.raises(InputError, match="must be from 0 to 3"):
        make_plan(model.spec, LLAMACPP, Options(gpu_layers=4))
    plain = open_model(GOLDEN / "llama-one-layer.gguf")
    with pytest.raises(UnsupportedError, match="--gpu-layers is for the llamacpp engine"):
        make_plan(model.spec, find_backend("reference", plain.file, plain.spec), Options(gpu_layers=0))
    with load(GOLDEN / "qwen3moe.gguf", backend="llamacpp", gpu_layers=0, kv_dtype="f32", logits_rows=64) as session:
        assert session.plan.config.gpu_layers == 0
        logits = session.engine.forward_all(tokens)
        np.testing.assert_allclose(logits[-len(expected) :], expected, atol=1e-3)


PROMISES = """
import json, sys
import edge
from edge.devices.memory import memory_use

promised = []
for path in sys.argv[1:]:
    with edge.load(path, backend="llamacpp", max_kv_size=512) as session:
        session.generate("a" * 300, max_tokens=8, raw=True)
        promised.append((session.plan.predicted_peak, memory_use().peak))
print(json.dumps(promised))
"""


@pytest.mark.slow
@pytest.mark.parametrize("names", [("deepseek2", "falcon-h1", "gemma4", "gpt-oss", "qwen35moe"), exhaustive(FALLBACKS)])
def test_fallback_peaks_stay_within_plans(names: tuple[str, ...]) -> None:
    """One process runs them all, each planned on top of what the others left."""
    child = run_child(PROMISES, *(GOLDEN / f"{name}.gguf" for name in names))
    assert child.status == 0, child.errors
    for name, (promised, peak) in zip(names, child.output, strict=True):
        assert peak <= promised, name
