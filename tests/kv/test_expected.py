"""Expected Attention on the engines, against the paper's formula with the reference engine's keys and values."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from test_architectures import require_native

from edge.backends.base import Engine
from edge.backends.expected import AHEAD, QueryMoments
from edge.backends.reference import ReferenceEngine
from edge.backends.reference.queries import measure
from edge.converters.calibrate import Walk
from edge.errors import UnsupportedError
from edge.kv import make_policy
from edge.kv.expected import shares
from edge.kv.policy import Gaussian
from edge.model.architectures.angles import find_angles
from edge.model.model import Model, open_model
from edge.model.tensors import find_network
from edge.run.sequences.eviction import view_for
from edge.run.starting.loading import load
from edge.types import AnyArray, FloatArray, IntArray

FLOOR = 0.02


def some_tokens(count: int, seed: int) -> IntArray:
    return np.random.default_rng(seed).integers(3, 200, count).astype(np.int32)


def queries_before_rope(model: Model, tokens: IntArray) -> list[AnyArray]:
    """Of each layer, float64 [heads, n, head], by the walk that calibrates quantizers."""
    walk, network, found = Walk(model.file, model.spec, tokens[None]), find_network(model.spec), []
    for layer, core in enumerate(network.attention):
        assert core is not None
        for names, inputs in walk.layer(layer):
            if names[0].endswith("attn_q"):
                assert not isinstance(inputs, tuple)
                heads = np.asarray(inputs @ walk.weights[names[0]].T, np.float64)
                heads = heads.reshape(-1, core.heads, core.head_dim).swapaxes(0, 1)
                if core.head_norms:
                    size = np.sqrt((heads**2).mean(axis=-1, keepdims=True) + model.spec.norm_eps)
                    heads = heads / size * walk.weights[f"{names[0]}_norm"]
                found.append(heads * core.scale)
    return found


def rotation_ahead(model: Model, layer: int, position: int) -> AnyArray:
    """The mean of RoPE's matrices for the positions from `position` on, [head, head], in the file's order."""
    network, core = find_network(model.spec), find_network(model.spec).attention[layer]
    assert core is not None
    angles = find_angles(model.file, network.ropes[network.rope_of(layer)])
    total = np.zeros((core.head_dim, core.head_dim))
    for at in range(position, position + AHEAD):
        matrix, pairs = np.eye(core.head_dim), angles.radians.size
        for pair, angle in enumerate(at * angles.radians):
            one, other = (pair, pair + pairs) if network.halves else (2 * pair, 2 * pair + 1)
            cos, sin = np.cos(angle) * angles.magnitude, np.sin(angle) * angles.magnitude
            matrix[[one, one, other, other], [one, other, one, other]] = cos, -sin, sin, cos
        total += matrix / AHEAD
    return total


def paper_scores(model: Model, measured: IntArray, tokens: IntArray, layers: list[int]) -> AnyArray:
    """Scores of the rows of `tokens`, [layers, KV heads, rows], by queries of `measured`."""
    engine = load_engine(model, "reference", "f32")
    assert isinstance(engine, ReferenceEngine)
    engine.forward(tokens)
    every, found = queries_before_rope(model, measured), []
    for layer in layers:
        core, ahead = find_network(model.spec).attention[layer], rotation_ahead(model, layer, tokens.size)
        assert core is not None
        for head in range(core.kv_heads):
            group = every[layer][head * core.group : (head + 1) * core.group, 4:].reshape(-1, core.head_dim)
            mean, covariance = ahead @ group.mean(axis=0), ahead @ np.cov(group.T, bias=True) @ ahead.T
            keys, values = (each[layer][head, : tokens.size] for each in (engine.kv.keys, engine.kv.values))
            weights = np.array([np.exp(mean @ key + key @ covariance @ key / 2) for key in keys.astype(np.float64)])
            norms = np.sqrt((values.astype(np.float64) ** 2).sum(axis=1))
            found.append((weights / weights.sum() + FLOOR) * norms)
    return np.array(found).reshape(len(layers), -1, tokens.size)


def moments_of(model: Model, tokens: IntArray) -> QueryMoments:
    measured = measure(model.file, model.spec, tokens)
    return QueryMoments.of(find_network(model.spec), np.concatenate([each.reshape(-1) for each in measured]))


def engine_scores(engine: Engine, moments: QueryMoments) -> FloatArray:
    policy = make_policy(f"expected:floor={FLOOR}")
    return policy.score(view_for(engine.kv, policy.needs, learned=moments))  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("backend", ["cpu", "onnx"])
@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen3", "gemma3", "phi3"])
def test_scores_are_the_papers(name: str, backend: str, engines: Callable[[Engine], Engine]) -> None:
    """Pairs that lie side by side or in halves, norms of heads, layers with windows."""
    require_native()
    if backend == "onnx":
        pytest.importorskip("onnxruntime")
    model, measured, tokens = open_model(GOLDEN / f"{name}.gguf"), some_tokens(100, 1), some_tokens(60, 2)
    moments = moments_of(model, measured)
    engine = engines(load_engine(model, backend, "f32"))
    engine.forward(tokens)
    scores = engine_scores(engine, moments)
    layers = list(engine.kv.layers)  # type: ignore[attr-defined]
    np.testing.assert_allclose(scores, paper_scores(model, measured, tokens, layers), rtol=1e-3)


@pytest.mark.parametrize("dtype", ["f16", "int8", "int4"])
def test_rounded_rows_have_nearly_the_same_scores(dtype: str, engines: Callable[[Engine], Engine]) -> None:
    require_native()
    model, tokens = open_model(GOLDEN / "llama-gqa-tied.gguf"), some_tokens(60, 2)
    moments, found = moments_of(model, some_tokens(100, 1)), []
    for each in ("f32", dtype):
        engine = engines(load_engine(model, "cpu", each))
        engine.forward(tokens)
        found.append(engine_scores(engine, moments))
    assert np.corrcoef(found[0].reshape(-1), found[1].reshape(-1))[0, 1] > (0.9 if dtype == "int4" else 0.999)


def test_the_expected_weight_is_the_mean_of_drawn_queries() -> None:
    """exp(μᵀk + kᵀΣk / 2) is E[exp(qᵀk)]."""
    random = np.random.default_rng(3)
    keys, spread = random.standard_normal((1, 6, 4)).astype(np.float32), random.standard_normal((4, 4)) / 6
    mean = random.standard_normal(4)
    drawn = mean + random.standard_normal((400_000, 4)) @ spread
    weights = np.exp(drawn @ keys[0].T.astype(np.float64)).mean(axis=0)
    gaussian = Gaussian(mean[None].astype(np.float32), (spread.T @ spread)[None].astype(np.float32))
    used = np.arange(6)[None] < 5
    found = shares(keys, gaussian, used)[0]
    np.testing.assert_allclose(found[:5], weights[:5] / weights[:5].sum(), rtol=0.05)
    assert found[5] == 0


def test_a_session_evicts_by_it_from_the_first_run_on() -> None:
    require_native()
    with load(
        GOLDEN / "llama-gqa-tied.gguf", backend="cpu", kv_policy="expected", max_kv_size=48, threads=1
    ) as session:
        session.generate(some_tokens(150, 5), max_tokens=40, ignore_eos=True)
        assert session.engine.kv.length <= 48
        assert session.report is not None
        assert session.report.tokens.generated == 40


def test_models_whose_queries_cannot_be_measured_are_refused() -> None:
    require_native()
    with pytest.raises(UnsupportedError, match="per-layer embeddings"):
        load(GOLDEN / "gemma4.gguf", backend="cpu", kv_policy="expected", max_kv_size=48, threads=1)
