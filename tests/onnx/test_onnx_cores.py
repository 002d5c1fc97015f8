"""Cores beyond attention and feed-forward networks in ONNX: folders, quantized experts, policies, and refusals.

Logits of the golden models are compared in tests/model/test_cores.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from conftest import Engines, all_logits, load_engine
from fallbacks import open_fallback
from small_models import Small, write_small

from edge.backends.base import Engine, EngineConfig, ObservedEngine
from edge.devices.profiles import find_profile
from edge.errors import UnsupportedError
from edge.model.model import open_model
from edge.types import FloatArray, IntArray

pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")

from edge.apps.npu_graphs import check_npu
from edge.backends.onnx.npu.form import make_form
from edge.converters.onnx.methods import find_method
from edge.converters.onnx.writer import write_onnx

EXACT = 2e-4


@pytest.mark.parametrize("name", ["qwen35moe", "gpt-oss", "gemma4"])
def test_folders_give_the_logits_of_the_file(tmp_path: Path, name: str) -> None:
    """The written weights are read back and compared, rows of experts in turn among them."""
    model, tokens, _ = open_fallback(name)
    write_onnx(model.file, model.spec, tmp_path / "folder")
    folder = open_model(tmp_path / "folder")
    ours, theirs = (all_logits(each, tokens, "onnx") for each in (folder, model))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "MXFP4"])
def test_quantized_experts_lose_as_8_bit_activations(tmp_path: Path, kind: str) -> None:
    """Of one layer, whose router sees what no rounded product has changed. Q4_K is rounded to 8 bits besides."""
    types = {"": "F32", **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), kind)}
    small = Small(hidden=256, heads=4, kv_heads=2, head=64, ffn=256, experts=8, architecture="qwen3moe", types=types)
    model = open_model(write_small(tmp_path / "model.gguf", small))
    tokens = np.random.default_rng(1).integers(3, small.vocab, 40).astype(np.int32)
    ours, exact = (all_logits(model, tokens, name) for name in ("onnx", "reference"))
    assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.9995


def observed(engine: Engine, tokens: IntArray) -> FloatArray:
    """Attention that rows received from all tokens, [layers, KV heads, rows]."""
    cast(ObservedEngine, engine).observe(8)
    for at in range(0, tokens.size, 8):
        engine.forward(tokens[at : at + 8])
    return np.asarray(engine.kv.attention)


@pytest.mark.parametrize(("name", "tolerance"), [("qwen35", 1e-4), ("gemma4", 1e-4), ("gpt-oss", 0.05)])
def test_attention_is_observed_as_in_the_native_engine(name: str, tolerance: float, engines: Engines) -> None:
    """Where layers have no rows, and where sinks take their share, behind experts that are rounded otherwise."""
    pytest.importorskip("tvm_ffi")
    model, tokens, _ = open_fallback(name)
    ours, theirs = (
        observed(engines(load_engine(model, each, "f32", observes=True)), tokens) for each in ("onnx", "cpu")
    )
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance)


def test_evicted_and_restored_rows_give_the_same_logits(engines: Engines) -> None:
    model, tokens, _ = open_fallback("granitehybrid")
    engine, other = (engines(load_engine(model, each, "f32")) for each in ("onnx", "reference"))
    kept = np.r_[0:4, 20:40].astype(np.int32)
    for each in (engine, other):
        each.forward_all(tokens[:40])
        each.kv.keep(kept, close_gaps=False)
    state, expected = engine.kv.save(), other.forward_all(tokens[40:])
    np.testing.assert_allclose(engine.forward_all(tokens[40:]), expected, rtol=0, atol=EXACT)
    engine.kv.truncate(0)
    engine.kv.append(state)
    np.testing.assert_allclose(engine.forward_all(tokens[40:]), expected, rtol=0, atol=EXACT)


def test_methods_and_npus_refuse_unknown_cores() -> None:
    model = open_fallback("lfm2")[0]
    with pytest.raises(UnsupportedError, match="nf4 does not know short convolutions"):
        find_method("nf4", model.file, model.spec)
    with pytest.raises(UnsupportedError, match="NPU does not run short convolutions yet"):
        make_form(model.spec, 64, 8, "f32")
    with pytest.raises(UnsupportedError, match="--npu has no vectors of each token for every layer"):
        check_npu(find_profile("pixel-9"), open_fallback("gemma4")[0].spec, EngineConfig(64, 8, "f16", 1))
