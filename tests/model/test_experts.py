"""Mixtures of experts in our engines: ties, routers without numbers, sinks, experts of any number and block type."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import SOME_GPU, Engines, all_logits, load_engine
from fallbacks import logits_of, open_fallback
from small_models import Small, write_small
from test_gguf_file import GGUF

from edge.backends.reference import attention
from edge.backends.tvm.gpu import design
from edge.backends.tvm.gpu.weights import make_weights
from edge.backends.tvm.gpu.weights import packed_bytes as gpu_bytes
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

GPU = f"gpu@{SOME_GPU}"
# Rows of whole blocks of any type; more experts than vectors have lanes; tiles that do not divide among 3 threads.
WIDE = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 256, "experts": 20, "used": 3}
MIXED = {"": "Q4_K", "blk.1.ffn_down_exps": "Q6_K", "token_embd": "Q8_0"}

cpu_and_gpu = pytest.mark.parametrize("backend", ["cpu", pytest.param(GPU, marks=pytest.mark.exhaustive)])


def small_model(folder: Path, **others: object) -> Model:
    shape = Small(**{**WIDE, "architecture": "qwen3moe", **others})  # type: ignore[arg-type]
    return open_model(write_small(folder / "model.gguf", shape))


def tokens_for(model: Model, count: int) -> IntArray:
    return np.random.default_rng(7).integers(3, model.spec.vocab, count).astype(np.int32)


@pytest.mark.slow
@pytest.mark.exhaustive
def test_quantized_experts_match_dequantized(tmp_path: Path) -> None:
    """Against gguf's dequantization; of all experts, so that activations of 8 bits cannot change the choice."""
    model = small_model(tmp_path, types=MIXED, used=20)
    tokens = tokens_for(model, 45)
    expected, exact, fast = (
        all_logits(model, tokens, *each) for each in (("reference", "f32"), ("cpu", "f32"), ("cpu", "f16"))
    )
    np.testing.assert_allclose(exact, expected, rtol=0, atol=1e-3)
    assert np.corrcoef(fast.ravel(), expected.ravel())[0, 1] > 0.999


@pytest.mark.slow
@pytest.mark.exhaustive
@cpu_and_gpu
def test_any_number_of_experts_matches_reference(backend: str, tmp_path: Path, engines: Engines) -> None:
    """More than whole vectors hold; of widths that are no whole tiles."""
    model = small_model(tmp_path, layers=1, hidden=64, head=16, ffn=24, experts=33)
    assert_as_reference(model, backend, [9, 1, 11], engines)


def assert_as_reference(model: Model, backend: str, pieces: list[int], engines: Engines) -> None:
    tokens = tokens_for(model, sum(pieces))
    expected, found = (
        logits_of(engines(load_engine(model, each, "f32")), tokens, pieces) for each in ("reference", backend)
    )
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("threads", [1, 3])
def test_sinks_share_observed_attention(threads: int, monkeypatch: pytest.MonkeyPatch, engines: Engines) -> None:
    """In steps and chunks, of the layer whose rows a policy chooses."""
    model, tokens, _ = open_fallback("gpt-oss")
    seen: list[FloatArray] = []
    softmax = attention.softmax
    monkeypatch.setattr(attention, "softmax", lambda x: seen.append(softmax(x)) or seen[-1])
    engine = engines(load_engine(model, "cpu", "f32", threads=threads, observes=True))
    oracle = engines(load_engine(model, "reference", "f32", chunk=8))
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
    assert_as_reference(model, backend, [16, 1, 3], engines)


@pytest.mark.exhaustive
def test_experts_of_a_layer_span_gpu_buffers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engines: Engines) -> None:
    """Whole experts in each, where a kernel sees few bytes; a plan counts them all."""
    model = small_model(tmp_path, types=MIXED)
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
