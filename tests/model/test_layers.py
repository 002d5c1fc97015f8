"""Cores in every engine: those that it runs give NumPy's logits, those that it does not are refused by name.

Gated delta nets (Qwen3.5), short convolutions (LFM2) and Mamba-2 are also compared with transformers and with
llama.cpp, and their fixed state goes the ways of a cache's rows: saved, restored, rolled back, evicted around.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, Engines, load_engine
from fallbacks import logits_of, open_fallback
from test_gguf_file import GGUF

from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.backends.kv_cache import RewindError
from edge.converters.pruning.prune import Pruning, check_pruning
from edge.errors import EngineError, InputError, UnsupportedError
from edge.model.model import Model, open_model

FILE = GOLDEN / "qwen35.gguf"
HYBRIDS = ("qwen35", "lfm2", "granitehybrid", "nemotron_h", "falcon-h1", "jamba", "falcon-mamba", "kimi-linear")
ON_GPU = ("lfm2", "falcon-h1")  # in make test, as in test_cores.py
OURS = ("reference", "cpu", f"gpu@{SOME_GPU}")
EXACT = 2e-4
U32, F32_TYPE = 4, 0


def with_heads(path: Path, heads: int, key_heads: int, size: int) -> Path:
    """The golden model with other heads in its delta net, at random."""
    file, random = GGUF.read(FILE), np.random.default_rng(heads)
    hidden, inner = file.tensors["token_embd.weight"][0][0], heads * size
    mixed = 2 * key_heads * size + inner
    said = {"state_size": size, "inner_size": inner, "time_step_rank": heads, "group_count": key_heads}
    return write_first_layer(file, path, "qwen35", random, said, {
        "attn_qkv.weight": (hidden, mixed), "attn_gate.weight": (hidden, inner), "ssm_conv1d.weight": (4, mixed),
        "ssm_dt.bias": (heads,), "ssm_a": (heads,), "ssm_beta.weight": (hidden, heads),
        "ssm_alpha.weight": (hidden, heads), "ssm_norm.weight": (size,), "ssm_out.weight": (inner, hidden),
    })  # fmt: skip


def with_groups(path: Path, heads: int, groups: int, size: int, head_dim: int) -> Path:
    """A golden model with other heads in its first layer's Mamba-2, at random."""
    file, random = GGUF.read(GOLDEN / "falcon-h1.gguf"), np.random.default_rng(heads)
    hidden, inner = file.tensors["token_embd.weight"][0][0], heads * head_dim
    mixed = inner + 2 * groups * size
    said = {"state_size": size, "inner_size": inner, "time_step_rank": heads, "group_count": groups}
    return write_first_layer(file, path, "falcon-h1", random, said, {
        "ssm_in.weight": (hidden, inner + mixed + heads), "ssm_conv1d.weight": (4, mixed), "ssm_conv1d.bias": (mixed,),
        "ssm_dt.bias": (heads,), "ssm_a": (1, heads), "ssm_d": (1, heads), "ssm_norm.weight": (inner // groups, groups),
        "ssm_out.weight": (inner, hidden),
    })  # fmt: skip


def write_first_layer(
    file: GGUF, path: Path, name: str, random: np.random.Generator, said: dict[str, int],
    shapes: dict[str, tuple[int, ...]],
) -> Path:  # fmt: skip
    file.metadata |= {f"{name}.ssm.{key}": (U32, value) for key, value in said.items()}
    for tensor, shape in shapes.items():
        drawn = random.standard_normal(shape[::-1]) * (0.5 if len(shape) > 1 else 1)
        values = -np.exp(drawn) if tensor == "ssm_a" else drawn
        if f"blk.0.{tensor}" in file.tensors:
            file.tensors[f"blk.0.{tensor}"] = (shape, F32_TYPE, values.astype("<f4").tobytes())
    return file.write(path)


def engines_for(model: Model) -> list[str]:
    """Those of ours that run the model."""
    network = model.spec.network
    return [name for name in OURS if not any(map(engine_named(name.partition("@")[0]).supports, network.cores))]


# What others have, too: Mamba-2, as falcon-h1, Mamba-1, as falcon-mamba, a delta net, as qwen35
RARELY = ("granitehybrid", "nemotron_h", "jamba", "kimi-linear")
each_hybrid = pytest.mark.parametrize(
    "hybrid", [pytest.param(each, marks=[pytest.mark.exhaustive] * (each in RARELY)) for each in HYBRIDS]
)
CASES = [
    pytest.param(
        name, hybrid, marks=[pytest.mark.exhaustive] * (hybrid in RARELY or ("gpu" in name and hybrid not in ON_GPU))
    )
    for hybrid in HYBRIDS for name in engines_for(open_fallback(hybrid)[0])
]  # fmt: skip


def test_delta_net_heads_share_keys(tmp_path: Path, engines: Engines) -> None:
    compare(open_model(with_heads(tmp_path / "model.gguf", 4, 2, 32)), engines, ["reference", "cpu"])


@pytest.mark.exhaustive
def test_mamba_heads_share_groups(tmp_path: Path, engines: Engines) -> None:
    model = open_model(with_groups(tmp_path / "model.gguf", 6, 3, 32, 16))
    compare(model, engines, engines_for(model))


def compare(model: Model, engines: Engines, backends: list[str]) -> None:
    """Logits of our engines with those of llama.cpp."""
    tokens = np.random.default_rng(1).integers(3, model.spec.vocab, 30).astype(np.int32)
    expected, *found = (
        logits_of(engines(load_engine(model, backend, "f32", capacity=64)), tokens, [20, 1, 9])
        for backend in ("llamacpp", *backends)
    )
    for each in found:
        np.testing.assert_allclose(each, expected, rtol=0, atol=2e-3)
        np.testing.assert_allclose(each, found[0], rtol=0, atol=EXACT)


@pytest.mark.parametrize(
    ("backend", "hybrid"), [*CASES, *(("llamacpp", each) for each in ("falcon-h1", "falcon-mamba", "lfm2", "qwen35"))]
)
def test_state_returns_with_its_rows(backend: str, hybrid: str, engines: Engines) -> None:
    model, tokens, _ = open_fallback(hybrid)
    engine, other = (engines(load_engine(model, backend, "f32", chunk=24)) for _ in range(2))
    exact = 1e-4 if backend == "llamacpp" else 0
    engine.forward(tokens[:20])
    end = engine.kv.save(20)
    assert engine.kv.earliest == 20
    expected = engine.forward_all(tokens[20:30]).copy()
    first, second = engine.kv.save(0, 8), engine.kv.save(8, 20)
    assert (first.tail, second.tail) == (None, None)
    with pytest.raises(RewindError, match="run the tokens again"):
        engine.kv.truncate(10)
    engine.kv.truncate(20, end)
    np.testing.assert_array_equal(engine.kv.positions, np.arange(20))
    np.testing.assert_allclose(engine.forward_all(tokens[20:30]), expected, rtol=0, atol=exact)

    other.kv.append(first)
    assert other.kv.earliest > other.kv.length
    with pytest.raises((EngineError, InputError), match=r"without their tail|missing"):
        other.forward(tokens[8:9])
    other.kv.append(replace(second, tail=end.tail))
    np.testing.assert_allclose(other.forward_all(tokens[20:30]), expected, rtol=0, atol=exact)
    if backend == "llamacpp":
        engine.kv.shrink(40)  # which takes the state to a new context
        np.testing.assert_allclose(engine.forward(tokens[30:31]), other.forward(tokens[30:31]), rtol=0, atol=exact)
        return
    other.kv.truncate(0)
    for damaged in (end.tail[:-4], bytes(end.tail[:-4]) + np.float32(np.nan).tobytes()):
        with pytest.raises(InputError, match="damaged"):
            other.kv.append(replace(engine.kv.save(0, 20), tail=damaged))
    assert other.kv.length == 0
    other.forward(tokens[:20])
    np.testing.assert_array_equal(other.forward_all(tokens[20:30]), expected)


@each_hybrid
def test_eviction_touches_rows_of_attention_only(hybrid: str, engines: Engines) -> None:
    model, tokens, _ = open_fallback(hybrid)
    found = []
    for backend in [name for name in engines_for(model) if "gpu" not in name or hybrid in ON_GPU]:
        engine = engines(load_engine(model, backend, "f32", chunk=24))
        engine.forward(tokens[:40])
        before = engine.kv.save(40).tail
        engine.kv.keep(np.r_[0:4, 20:40].astype(np.int32), close_gaps=True)
        assert engine.kv.save(24).tail == before
        found.append(engine.forward_all(tokens[40:60]).copy())
        with pytest.raises(RewindError, match="evicted"):
            engine.kv.truncate(20, replace(engine.kv.save(44), next_position=3))
    for each in found[1:]:
        np.testing.assert_allclose(each, found[0], rtol=0, atol=EXACT)


def test_models_without_pruning_and_adapters_are_refused() -> None:
    for name in ("qwen35", "qwen3moe"):
        with pytest.raises(UnsupportedError, match="cannot be pruned"):
            check_pruning(open_fallback(name)[0].spec, Pruning(layers=1))
    with pytest.raises(UnsupportedError, match="with adapters does not run mixtures of experts"):
        engine_named("cpu").footprint(open_fallback("qwen3moe")[0].spec, EngineConfig(64, 16, "f16", 1, lora_rank=8))
