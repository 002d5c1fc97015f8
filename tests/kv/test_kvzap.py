"""KVzap on the engines, against the formulas computed from the inputs of projections."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, Engines, exhaustive, load_engine, some_tokens
from test_architectures import require_native

from edge.backends.importance import RowImportance, importance_bytes
from edge.backends.reference import importance, learned
from edge.converters.calibrate import Walk
from edge.errors import UnsupportedError
from edge.kv import make_policy
from edge.kv.policy import KVView
from edge.model.architectures.angles import find_angles
from edge.model.model import Model, open_model
from edge.model.tensors import find_network
from edge.run.sequences.eviction import view_for
from edge.run.starting.loading import load
from edge.types import AnyArray, IntArray

NEEDS = make_policy("kvzap").needs
Projected = dict[str, AnyArray]


def projected(model: Model, tokens: IntArray) -> list[Projected]:
    """Queries, keys and values before RoPE of each layer, float64 [heads, n, head], attention's input [n, hidden] and
    its output projection, by the walk that calibrates quantizers."""
    walk, network, found = Walk(model.file, model.spec, tokens[None]), find_network(model.spec), []
    for layer, core in enumerate(network.attention):
        own: Projected = {}
        for names, inputs in walk.layer(layer):
            assert not isinstance(inputs, tuple)
            for name in (each for each in names if core and each.endswith(("attn_q", "attn_k", "attn_v"))):
                heads = np.asarray(inputs @ walk.weights[name].T, np.float64).reshape(tokens.size, -1, core.head_dim)
                if core.head_norms and not name.endswith("attn_v"):
                    size = np.sqrt((heads**2).mean(axis=-1, keepdims=True) + model.spec.norm_eps)
                    heads = heads / size * walk.weights[f"{name}_norm"]
                elif core.unit_values and name.endswith("attn_v"):
                    heads = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + model.spec.norm_eps)
                own |= {name[-1]: heads.swapaxes(0, 1), "input": np.asarray(inputs, np.float64)}
            if names[0].endswith("attn_output"):
                own["output"] = np.asarray(walk.weights[names[0]], np.float64)
        found.append(own)
    return found


def inputs_of(own: Projected, head: int) -> AnyArray:
    """The features of a KV head's rows."""
    key, value = own["k"][head], own["v"][head]
    norms = np.sqrt([(key**2).sum(axis=1), (value**2).sum(axis=1)])
    return np.concatenate([key, np.log(norms.T + 1e-6)], axis=1)


def rotated(model: Model, layer: int, heads: AnyArray) -> AnyArray:
    """RoPE by complex numbers."""
    network = find_network(model.spec)
    angles = find_angles(model.file, network.ropes[network.rope_of(layer)]).radians
    ends = (slice(angles.size), slice(angles.size, None)) if network.halves else (slice(0, None, 2), slice(1, None, 2))
    both = heads[..., ends[0]] + 1j * heads[..., ends[1]]
    both = both * np.exp(1j * np.arange(heads.shape[1])[:, None] * angles)
    result = np.empty_like(heads)
    result[..., ends[0]], result[..., ends[1]] = both.real, both.imag
    return result


@pytest.mark.parametrize("name", ["qwen3", "gemma4"])
def test_fit_is_ridge_regression_of_papers_target(name: str) -> None:
    """Of all layers that read the rows: the last of Gemma 4 has queries only."""
    model, text, rows = open_model(GOLDEN / f"{name}.gguf"), some_tokens(90, 1), 90
    found, attention = importance.fit(model.file, model.spec, text), find_network(model.spec).attention
    layers = projected(model, np.concatenate([text, text]))
    ranked = [layer for layer, core in enumerate(attention) if core.rows_of is None and not core.window]
    for number, layer in enumerate(ranked):
        core, own, keys = attention[layer], layers[layer], rotated(model, layer, layers[layer]["k"])
        readers = [reader for reader, each in enumerate(attention) if layer in (reader, each.rows_of)]
        assert len(readers) == (1 if name == "qwen3" else 2)
        for head in range(core.kv_heads):
            best = np.zeros(rows)
            for reader, query in product(readers, range(head * core.group, (head + 1) * core.group)):
                other, queries = layers[reader], rotated(model, reader, layers[reader]["q"])
                part = other["output"][:, query * core.head_dim : (query + 1) * core.head_dim]
                written = np.linalg.norm(own["v"][head][:rows] @ part.T, axis=1)
                for at in range(rows, 2 * rows):
                    weights = np.exp(keys[head][: at + 1] @ queries[query][at] * core.scale)
                    paid = weights[:rows] / weights.sum() / np.linalg.norm(other["input"][at])
                    best = np.maximum(best, paid * written)
            x, y = inputs_of(own, head)[4:rows], np.log(best[4:])
            mean, spread = x.mean(axis=0), np.where(x.std(axis=0) < 1e-4, np.inf, x.std(axis=0) + 1e-3)
            damped = np.concatenate([(x - mean) / spread, np.sqrt(0.01 * len(x)) * np.eye(x.shape[1])])
            wanted = np.linalg.lstsq(damped, np.append(y - y.mean(), np.zeros(x.shape[1])), rcond=None)[0]
            ours = x @ found[number][head, :-1] + found[number][head, -1]
            np.testing.assert_allclose(ours, (x - mean) / spread @ wanted + y.mean(), atol=2e-2)
            assert np.corrcoef(ours, y)[0, 1] > 0.4


@pytest.mark.parametrize("name", ["qwen35", "gemma3", "gpt-oss", "gemma4"])
def test_fit_ignores_batch_of_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent states, windows and sinks of attention, too."""
    model, found = open_model(GOLDEN / f"{name}.gguf"), []
    for tokens in (7, 1000):
        monkeypatch.setattr(importance, "_AT_ONCE", tokens)
        found.append(importance.fit(model.file, model.spec, some_tokens(40, 1)))
    for parts, whole in zip(*found, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-3, atol=1e-4)


def random_importance(model: Model, seed: int) -> RowImportance:
    network = find_network(model.spec)
    values = np.random.default_rng(seed).standard_normal(importance_bytes(network) // 4)
    return RowImportance.of(network, values.astype(np.float32) / 8)


@pytest.mark.parametrize("backend", ["cpu", "onnx"])
@pytest.mark.parametrize("name", ["qwen3", exhaustive("phi3")])
def test_engines_predict_from_rows_what_projections_give(name: str, backend: str, engines: Engines) -> None:
    """Norms of heads; phi3 has a matrix for queries, keys and values."""
    model, tokens = open_model(GOLDEN / f"{name}.gguf"), some_tokens(60, 2)
    known = random_importance(model, 3)
    engine = engines(load_engine(model, backend, "f32"))
    engine.forward(tokens)
    scores = make_policy("kvzap:kernel=1").score(view_for(engine.kv, NEEDS, learned=known))
    for layer, own in enumerate(projected(model, tokens)):
        for head, weights in enumerate(known.layers[layer]):
            wanted = np.exp(inputs_of(own, head) @ weights[:-1] + weights[-1])
            np.testing.assert_allclose(scores[layer, head], wanted, rtol=5e-3)


def test_heads_with_important_rows_keep_more() -> None:
    scores = np.full((2, 1, 40), 0.1, np.float32)
    scores[1, 0, 4:34] = 9
    view = KVView(40, np.full((2, 1), 40, np.int32), longest=60, importance=lambda layer: scores[layer])
    few, many = make_policy("kvzap:sinks=0,recent=0.1,floor=0.5,kernel=1").rows_to_keep(view, 20)
    assert few.size + many.size == 40
    assert many.size > few.size >= 10
    assert {*many.tolist()} <= {*range(4, 34), 38, 39}


def test_importance_of_rows_is_fitted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))
    model = open_model(GOLDEN / "llama-gqa-tied.gguf")
    assert learned.making_bytes(model.file, model.spec) > 0
    first = learned.find(model.file, model.spec, some_tokens(50, 1))
    again = learned.find(model.file, model.spec, some_tokens(50, 2))
    assert learned.making_bytes(model.file, model.spec) == 0
    for layer, values in first.layers.items():
        np.testing.assert_array_equal(values, again.layers[layer])
    (path,) = (each for each in (tmp_path / "weights").iterdir() if each.suffix == ".importance")
    path.write_bytes(path.read_bytes()[:-2])
    assert learned.stored(model.file, model.spec) is None  # damaged: made again


@pytest.mark.parametrize("name", ["llama-gqa-tied", *map(exhaustive, ("qwen35", "gemma4"))])
def test_kvzap_evicts_in_first_run(name: str) -> None:
    """Also beside layers with windows, whose rows it does not see, and beside recurrent ones."""
    require_native()
    path = GOLDEN / f"{name}.gguf"
    with load(path, backend="cpu", kv_policy="kvzap", max_kv_size=64, threads=1) as session:
        session.generate(some_tokens(150, 5), max_tokens=40, ignore_eos=True)
        assert session.report.tokens.generated == 40
        lengths = session.engine.kv.head_lengths  # type: ignore[attr-defined]
        assert lengths.size == 1 or np.unique(lengths).size > 1


def test_onnx_takes_even_kvzap_only() -> None:
    pytest.importorskip("onnxruntime")
    path = GOLDEN / "llama-gqa-tied.gguf"
    with pytest.raises(UnsupportedError, match="for every head"):
        load(path, backend="onnx", kv_policy="kvzap", max_kv_size=64, threads=1)
    with load(path, backend="onnx", kv_policy="kvzap:floor=1", max_kv_size=64, threads=1) as session:
        session.generate(some_tokens(150, 5), max_tokens=40, ignore_eos=True)
        assert np.unique(session.engine.kv.head_lengths).size == 1  # type: ignore[attr-defined]


def test_models_whose_rows_cannot_be_ranked_are_refused() -> None:
    require_native()
    with pytest.raises(UnsupportedError, match="use streaming"):
        load(GOLDEN / "llama-window.gguf", backend="cpu", kv_policy="kvzap", max_kv_size=64, threads=1)
