"""Mixtures of experts in our engines: ties, routers without numbers, sinks, experts of any number and block type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SOME_GPU, Engines, load_engine
from fallbacks import logits_of, open_fallback
from small_models import Small, write_small
from test_gguf_file import GGUF, U32

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.reference import attention
from edge.backends.tvm.engine import NativeEngine
from edge.backends.tvm.gpu import design
from edge.backends.tvm.gpu.weights import make_weights
from edge.backends.tvm.gpu.weights import packed_bytes as gpu_bytes
from edge.errors import ModelFormatError
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

GPU = f"gpu@{SOME_GPU}"
# Rows of whole blocks of any type; more experts than vectors have lanes; tiles that do not divide among 3 threads.
WIDE = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 256, "experts": 20, "used": 3}
TYPES = (
    {"": "MXFP4", "token_embd": "Q8_0"}, {"": "Q4_0", "ffn_down_exps": "Q8_0"},
    {"": "Q4_K", "blk.1.ffn_down_exps": "Q6_K"}, {"": "Q8_0"},
)  # fmt: skip

cpu_and_gpu = pytest.mark.parametrize("backend", ["cpu", pytest.param(GPU, marks=pytest.mark.exhaustive)])


def small_model(folder: Path, **others: object) -> Model:
    shape = Small(**{**WIDE, "architecture": "qwen3moe", **others})  # type: ignore[arg-type]
    return open_model(write_small(folder / "model.gguf", shape))


def tokens_for(model: Model, count: int) -> IntArray:
    return np.random.default_rng(7).integers(3, model.spec.vocab, count).astype(np.int32)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("used", "least"), [(3, 0.99), (20, 0.999)])
@pytest.mark.parametrize("types", [pytest.param(types, id=types[""]) for types in TYPES])
def test_quantized_experts_match_dequantized(
    types: dict[str, str], used: int, least: float, tmp_path: Path, engines: Engines
) -> None:
    """Against gguf's dequantization. Where activations of 8 bits cannot change the choice, answers are closer."""
    model = small_model(tmp_path, types=types, used=used)
    tokens = tokens_for(model, 45)
    expected, exact, fast = (
        engines(load_engine(model, *each)).forward_all(tokens)
        for each in (("reference", "f32"), ("cpu", "f32"), ("cpu", "f16"))
    )
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-3)
    assert np.corrcoef(fast.ravel(), expected.ravel())[0, 1] > least


@pytest.mark.slow
@pytest.mark.exhaustive
@cpu_and_gpu
@pytest.mark.parametrize(("experts", "used"), [(1, 1), (16, 16), (33, 2)])
def test_any_number_of_experts_matches_reference(
    experts: int, used: int, backend: str, tmp_path: Path, engines: Engines
) -> None:
    """One, all of them, and more than whole vectors hold; of widths that are no whole tiles."""
    model = small_model(tmp_path, layers=1, hidden=64, head=16, ffn=24, experts=experts, used=used)
    tokens = tokens_for(model, 21)
    expected, found = (
        logits_of(engines(load_engine(model, each, "f32")), tokens, [9, 1, 11]) for each in ("reference", backend)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_sinks_share_observed_attention(threads: int, monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    """In steps and chunks, of the layer whose rows a policy chooses."""
    model, tokens, _ = open_fallback("gpt-oss")
    seen: list[FloatArray] = []
    softmax = attention.softmax
    monkeypatch.setattr(attention, "softmax", lambda x: seen.append(softmax(x)) or seen[-1])
    module = find_backend("cpu", model.file, model.spec)
    engine = engines(module.load(model.file, model.spec, EngineConfig(128, 8, "f32", threads, 8, observes=True)))
    oracle = engines(load_engine(model, "reference", "f32", chunk=8))
    assert isinstance(engine, NativeEngine)
    engine.observe(1)
    expected = np.zeros((model.spec.kv_heads, 30), np.float32)
    for at, count in ((0, 8), (8, 8), (16, 8), *((token, 1) for token in range(24, 30))):
        engine.forward(tokens[at : at + count])
        oracle.forward(tokens[at : at + count])
        shares = seen[-1][..., -1, :-1].mean(axis=1)  # without the sink's
        assert (shares.sum(axis=-1) < 1).all()
        expected[:, : at + count] += shares
    np.testing.assert_allclose(engine.kv.attention[-1], expected, atol=1e-5)


def with_router(mixture: str, path: Path, change: Callable[[FloatArray], FloatArray]) -> Model:
    """A golden model with another matrix of each router, [experts, hidden]."""
    file = GGUF.read(open_fallback(mixture)[0].file.path)
    for name, (shape, kind, data) in file.tensors.items():
        if str(name).endswith("ffn_gate_inp.weight"):
            matrix = np.frombuffer(data, np.float32).reshape(shape[::-1])
            file.tensors[name] = (shape, kind, change(matrix).astype("<f4").tobytes())
    return open_model(file.write(path))


@cpu_and_gpu
@pytest.mark.parametrize("mixture", ["qwen3moe", "lfm2moe"])
def test_of_equal_experts_first_are_chosen(mixture: str, backend: str, tmp_path: Path, engines: Engines) -> None:
    model = with_router(mixture, tmp_path / "model.gguf", lambda matrix: np.repeat(matrix[:1], len(matrix), axis=0))
    tokens = tokens_for(model, 20)
    expected, found = (
        logits_of(engines(load_engine(model, each, "f32")), tokens, [16, 1, 3]) for each in ("reference", backend)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.exhaustive
def test_experts_of_a_layer_span_gpu_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Engines) -> None:
    """Whole experts in each, where a kernel sees few bytes; a plan counts them all."""
    model = small_model(tmp_path, types={"": "Q4_K", "blk.1.ffn_down_exps": "Q6_K", "token_embd": "Q8_0"})
    monkeypatch.setattr(design, "make_weights", lambda file, spec, _limit: make_weights(file, spec, 800 << 10))
    engine, tokens = engines(load_engine(model, GPU, "f32")), tokens_for(model, 21)
    weights = engine.design.weights  # type: ignore[attr-defined]
    assert [len(pieces) for pieces in weights.experts] == [3, 4]
    assert weights.nbytes <= gpu_bytes(model.spec) <= 1.1 * weights.nbytes
    expected = logits_of(engines(load_engine(model, "reference", "f32")), tokens, [21])
    np.testing.assert_allclose(logits_of(engine, tokens, [9, 1, 11]), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("value", "backend"), [
    (np.nan, "cpu"), (-np.inf, "cpu"), pytest.param(np.nan, GPU, marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_infinite_router_chooses_first_experts(value: float, backend: str, tmp_path: Path, engines: Engines) -> None:
    model = with_router("qwen3moe", tmp_path / "model.gguf", lambda matrix: np.full_like(matrix, value))
    engine, tokens = engines(load_engine(model, backend, "f32")), tokens_for(model, 20)
    np.testing.assert_array_equal(logits_of(engine, tokens, [16, 1, 3]), logits_of(engine, tokens, [1] * 20))


@pytest.mark.parametrize("backend", ["reference", pytest.param("cpu", marks=pytest.mark.exhaustive)])
def test_shares_are_scaled_as_header_says(backend: str, tmp_path: Path, engines: Engines) -> None:
    """A scale of 2 does what matrices of twice the size do."""
    file = GGUF.read(open_fallback("qwen3moe")[0].file.path)
    doubled = GGUF.read(open_fallback("qwen3moe")[0].file.path)
    file.metadata["qwen3moe.expert_weights_scale"] = (6, 2.0)
    for name, (shape, kind, data) in doubled.tensors.items():
        if "ffn_down_exps" in str(name):
            doubled.tensors[name] = (shape, kind, (2 * np.frombuffer(data, np.float32)).tobytes())
    one, other = (open_model(each.write(tmp_path / f"{at}.gguf")) for at, each in enumerate((file, doubled)))
    tokens = tokens_for(one, 20)
    found = [logits_of(engines(load_engine(each, backend, "f32")), tokens, [19, 1]) for each in (one, other)]
    np.testing.assert_allclose(*found, rtol=0, atol=1e-4)


def test_impossible_experts_are_refused(tmp_path: Path) -> None:
    for key, value in (("expert_used_count", 5), ("expert_feed_forward_length", 1 << 30), ("expert_group_count", 3)):
        file = GGUF.read(open_fallback("qwen3moe")[0].file.path)
        file.metadata[f"qwen3moe.{key}"] = (U32, value)
        path = file.write(tmp_path / "model.gguf")
        with pytest.raises(ModelFormatError, match=r"of 4 experts|must be from"):
            open_model(path)
    file = GGUF.read(open_fallback("qwen3moe")[0].file.path)
    shape, kind, data = file.tensors["blk.0.ffn_up_exps.weight"]
    file.tensors["blk.0.ffn_up_exps.weight"] = ((shape[0], shape[1] * shape[2] // 2, 2), kind, data)
    model = open_model(file.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelFormatError, match=r"ffn_up_exps.weight has shape \(16, 32, 2\) instead of \(16, 16, 4\)"):
        find_backend("reference", model.file, model.spec)
