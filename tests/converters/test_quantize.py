"""Quantized models: what methods gain on data that they did not see, and that they change nothing but the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import all_logits, examples, exhaustive, mean_kl
from fallbacks import open_fallback
from small_models import Small, write_small

from edge.backends.base import EngineConfig
from edge.backends.reference import ReferenceEngine
from edge.converters.calibrate import Walk, collect, gram, sequences, stages
from edge.converters.convert import Conversion, convert
from edge.converters.gguf.quantize import (
    CALIBRATED,
    METHODS,
    Settings,
    fold_layer,
    mix_types,
    plan_types,
    quantize_gguf,
)
from edge.converters.pruning.prune import Pruning
from edge.converters.quantizers.awq import Folds
from edge.converters.quantizers.gptq import damped, gptq, prepare
from edge.converters.quantizers.mixed import AROUND, Stage, allocate, types_of_gguf
from edge.converters.quantizers.polish import polish
from edge.converters.quantizers.rtn import nearest, quantize
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.blocks import GRIDS, dequantize, nbytes
from edge.model.model import Model, open_model
from edge.model.tensors import find_tensors
from edge.types import AnyArray, FloatArray, IntArray

FAMILIES: tuple[str, ...] = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt2")
SCALED = ("granite", "mistral3", "smollm3")
HYBRIDS = ("lfm2", "qwen35", "granitehybrid", "falcon-h1", "gemma4", "gemma4moe")
OFTEN = ("llama", "gemma3", "gpt2", "phi3", "granite", "qwen35", "falcon-h1", "gemma4moe", "qwen3moe")  # in make test
EXPERTS = Small(layers=2, architecture="qwen3moe", experts=6, used=2)
FIELDS: dict[str, dict[str, Any]] = {
    "granite": {"attention__scale": 0.1, "embedding_scale": 1.7, "residual_scale": 0.4, "logit_scale": 0.6},
    "mistral3": {"attention__temperature_scale": 0.3, "rope__scaling__original_context_length": 24},
}
WHOLE = {"embedding": "F32", "output": "F32"}  # only matrices of layers are rounded
CONFIG = EngineConfig(96, 96, "f32", 1, logits_rows=96)
TOKENS = np.random.default_rng(1).integers(3, 272, 2048).astype(np.int32)
OTHERS = np.random.default_rng(2).integers(3, 272, 96).astype(np.int32)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    folder = tmp_path_factory.mktemp("families")

    @lru_cache
    def make(name: str) -> Model:
        if name in HYBRIDS:
            return open_fallback(name)[0]
        if name == "qwen3moe":
            return open_model(write_small(folder / f"{name}.gguf", EXPERTS))
        shape = Small(layers=4 if name == "smollm3" else 2, architecture=name, tied=name != "phi3")
        return open_model(write_small(folder / f"{name}.gguf", shape, **FIELDS.get(name, {})))

    return make


def predicted(model: Model, backend: str = "reference") -> FloatArray:
    kv_dtype = {"reference": "f32"}.get(backend, "f16")
    return all_logits(model, OTHERS, backend, kv_dtype, capacity=96, chunk=96, logits_rows=96)


def mixed_inputs(tokens: int, columns: int, seed: int) -> FloatArray:
    """Inputs that go together, in the same way for every seed, some of them large."""
    mixing = np.random.default_rng(3).standard_normal((columns // 4, columns)) * np.geomspace(0.1, 3, columns)
    random = np.random.default_rng(seed)
    return (random.standard_normal((tokens, columns // 4)) @ mixing + 0.1 * random.standard_normal((tokens, columns))
            ).astype(np.float32)  # fmt: skip


def output_error(weight: FloatArray, rounded: FloatArray, inputs: FloatArray) -> float:
    return float(np.square(inputs @ (weight - rounded).T).mean())


WEIGHT = np.random.default_rng(4).standard_normal((24, 160)).astype(np.float32)
INPUTS = mixed_inputs(2000, 160, seed=5)
HESSIAN = gram(INPUTS)
DAMPED = damped(HESSIAN, len(INPUTS))


@pytest.mark.parametrize("kind", sorted(GRIDS))
@pytest.mark.parametrize("group_size", [32, 128])  # 160 = 1.25 · 128: the last group is ragged
@pytest.mark.parametrize("act_order", [exhaustive(False), True])
def test_gptq_makes_errors_good(kind: str, group_size: int, act_order: bool) -> None:
    """On inputs that it did not see, and its bytes say what it means."""
    unseen, grid = mixed_inputs(500, 160, seed=6), GRIDS[kind]
    found = gptq(WEIGHT, prepare(DAMPED, act_order=act_order, group_size=group_size), grid)
    plain = nearest(WEIGHT, grid, np.diag(HESSIAN), group_size)
    assert output_error(WEIGHT, found.values, unseen) < 0.75 * output_error(WEIGHT, plain.values, unseen)
    np.testing.assert_allclose(dequantize(found.data, kind), found.values, rtol=1e-6, atol=1e-6)
    assert (found.scales[:, :4] == found.scales[:, :1]).all() or group_size == 32


@pytest.mark.parametrize("kind", sorted(GRIDS))
def test_polish_only_gains(kind: str) -> None:
    def cost(values: FloatArray) -> float:
        return float((((WEIGHT - values) @ DAMPED) * (WEIGHT - values)).sum())

    first = gptq(WEIGHT, prepare(DAMPED), GRIDS[kind])
    before = first.values.copy()
    once, twice, *more = (polish(WEIGHT, first, DAMPED, sweeps=sweeps) for sweeps in range(1, 8))
    np.testing.assert_array_equal(first.values, before)
    assert cost(twice.values) < cost(once.values) < cost(first.values)
    assert (np.diff([cost(each.values) for each in (twice, *more)]) < 1e-6 * cost(twice.values)).all()
    np.testing.assert_allclose(dequantize(twice.data, kind), twice.values, rtol=1e-6, atol=1e-6)
    shared = gptq(WEIGHT, prepare(DAMPED, group_size=64), GRIDS[kind])
    refined = polish(WEIGHT, shared, DAMPED, group_size=64)
    np.testing.assert_array_equal(refined.scales, shared.scales)
    assert cost(refined.values) < cost(shared.values)


@pytest.mark.parametrize("name", [
    *OFTEN, *(exhaustive(each) for each in (*FAMILIES, *SCALED, *HYBRIDS) if each not in OFTEN),
])  # fmt: skip
def test_scaling_factors_keep_unrounded_products(family: Callable[[str], Model], name: str) -> None:
    model = family(name)
    types, sources = plan_types(model.file, model.spec, Settings(**WHOLE)), find_tensors(model.file, model.spec)
    kinds = {name: types[source.tensor] for name, source in sources.items()}
    folds, walk = Folds(), Walk(model.file, model.spec, sequences(TOKENS))
    for layer in range(model.spec.layers):
        fold_layer(folds, walk, layer, dict(walk.layer(layer)), model.spec, kinds)
    assert all(np.ptp(np.log(factors)) > 0 for factors in folds.columns.values()) or name != "llama"
    assert folds.columns
    weights = folds.read(model.file, sources)
    found = ReferenceEngine(model.file, model.spec, CONFIG, weights).forward_all(OTHERS)
    np.testing.assert_allclose(found, predicted(model), atol=1e-4)


# The KL divergence from the whole model's predictions, as a share of plain rounding's: the most in one family, and on
# average. Single random models differ: hqq knows nothing of inputs and minimizes another norm.
GAINS = {"rtn": (1.0, 1.0), "hqq": (1.15, 1.0), "importance": (1.0, 0.92), "awq": (1.1, 0.75), "gptq": (1.0, 0.7)}
GAINS["best"] = (0.8, 0.6)


@pytest.fixture(scope="module")
def rounded(
    family: Callable[[str], Model], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[FloatArray, float]]:
    """By family: the whole model's logits, and the divergence that plain rounding causes."""

    @lru_cache
    def find(name: str) -> tuple[FloatArray, float]:
        model, path = family(name), tmp_path_factory.mktemp("plain") / "plain.gguf"
        quantize_gguf(model.file, model.spec, path, Settings(method="rtn", **WHOLE))
        exact = predicted(model)
        return exact, mean_kl(exact, predicted(open_model(path)))

    return find


@pytest.mark.parametrize("method", METHODS)
def test_quantized_models_run_and_methods_gain(
    family: Callable[[str], Model], rounded: Callable[[str], tuple[FloatArray, float]], method: str, tmp_path: Path
) -> None:
    """In make test of four families, which have each form of norms, positions and feed-forward networks."""
    shares = []
    for name in FAMILIES if examples(1) > 1 else ("llama", "qwen3", "gemma3", "gpt2"):
        model = family(name)
        report = quantize_gguf(model.file, model.spec, tmp_path / "q.gguf", Settings(method=method, **WHOLE), TOKENS)
        found = open_model(tmp_path / "q.gguf")
        assert {each: info.type for each, info in found.file.tensors.items()} == report.types
        assert {info.type for each, info in found.file.tensors.items() if "attn_output.weight" in each} == {"Q4_0"}
        assert report.nbytes == sum(info.nbytes for info in found.file.tensors.values())
        exact, plain = rounded(name)
        shares.append(mean_kl(exact, predicted(found)) / plain)
    most, mean = GAINS[method]
    assert max(shares) <= most
    assert np.exp(np.log(shares).mean()) <= mean


@pytest.mark.parametrize("name", ["qwen3moe", "qwen35moe", "lfm2moe", "gpt-oss"])
def test_walk_of_experts_is_pass(name: str) -> None:
    """Token by token in the one, expert by expert in the other."""
    model, tokens, expected = open_fallback(name)
    walk = Walk(model.file, model.spec, tokens[None])
    for layer in range(model.spec.layers):
        assert [names for names, _ in walk.layer(layer)] == list(stages(model.spec, layer))
    np.testing.assert_allclose(walk.logits_of(walk.finish())[-len(expected) :], expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", [
    "Q4_1", "NF4", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in (*sorted(GRIDS), "F16")),
])  # fmt: skip
def test_llamacpp_runs_written_quantizations(family: Callable[[str], Model], kind: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = family("llama")
    settings = Settings(type=kind, embedding="Q8_0", output="Q8_0")
    quantize_gguf(model.file, model.spec, tmp_path / "q.gguf", settings, TOKENS)
    found = open_model(tmp_path / "q.gguf")
    ours, theirs = predicted(found), predicted(found, "llamacpp")
    assert np.abs(ours - theirs).mean() < 0.05 * np.abs(ours - ours.mean()).mean()  # it rounds activations to 8 bits


def test_plain_rounding_is_ggufs(family: Callable[[str], Model], tmp_path: Path) -> None:
    model = family("llama")
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        quantize_gguf(model.file, model.spec, tmp_path / "q.gguf", Settings(type=kind, method="rtn"))
        found = open_model(tmp_path / "q.gguf")
        for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight"):
            wanted = quantize(_floats(model, name), kind).reshape(-1)
            assert np.array_equal(found.file.tensor_bytes(found.file.tensors[name]), wanted)
    for name in ("a", "b"):
        quantize_gguf(model.file, model.spec, tmp_path / name, Settings(), TOKENS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_ragged_rows_stay_half_floats(tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "m.gguf", Small(ffn=72)))
    for method in ("rtn", "best"):
        report = quantize_gguf(model.file, model.spec, tmp_path / "q.gguf", Settings(method=method), TOKENS)
        assert report.types["blk.0.ffn_down.weight"] == "F16"
        assert report.notes == (
            "blocks of Q4_0 have 32 values, and 1 of 8 matrices have rows of 72, no multiple of that: they became "
            "1 × F16",
        )
        assert np.isfinite(predicted(open_model(tmp_path / "q.gguf"))).all()


def test_refused_tokens_settings_and_weights(family: Callable[[str], Model], tmp_path: Path) -> None:
    model, path = family("llama"), tmp_path / "q.gguf"
    for method in CALIBRATED:
        for tokens, message in ((None, "needs a calibration text"), (TOKENS[:100], "at least 128 tokens")):
            with pytest.raises(InputError, match=message):
                quantize_gguf(model.file, model.spec, path, Settings(method=method), tokens)
    for wrong, error in (
        ({"type": "Q3_K"}, UnsupportedError), ({"method": "magic"}, InputError), ({"group_size": 48}, InputError)
    ):  # fmt: skip
        with pytest.raises(error):
            quantize_gguf(model.file, model.spec, path, Settings(**wrong), TOKENS)
    assert not any(tmp_path.iterdir())

    def spoil(weights: dict[str, AnyArray]) -> None:
        weights["blk.0.ffn_up"][3, 5] = np.nan

    spoilt = open_model(write_small(tmp_path / "m.gguf", Small(), spoil))
    for method in METHODS:
        with pytest.raises(ModelFormatError, match=r"no numbers|finite"):
            quantize_gguf(spoilt.file, spoilt.spec, path, Settings(method=method), TOKENS)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


CONVERSIONS = {
    **{f"{method} {kind}": Conversion("gguf", settings=Settings(kind, method))
       for method, kind in (("rtn", "Q4_0"), ("rtn", "F16"), ("rtn", "NF4"), ("hqq", "Q4_1"), ("best", "Q4_0"))},
    "a group": Conversion("gguf", settings=Settings("Q4_0", "rtn", group_size=64)),
    "folder": Conversion("hf", settings=Settings("F16", "rtn")),
    "pruned": Conversion("gguf", pruning=Pruning(ffn=0.5)),
}  # fmt: skip


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("what", CONVERSIONS)
@pytest.mark.parametrize("kind", ["F32", "Q4_1"])
def test_overflowing_weights_raise_one_line(kind: str, what: str, tmp_path: Path) -> None:
    """Finite ones, which were written as infinite scales; and damaged scales. Without NumPy's warnings."""
    small = Small(types=kind)
    rows, size = small.ffn, nbytes(kind, small.hidden)
    raw = np.full((rows, size), 0x7C, np.uint8) if kind == "Q4_1" else np.full((rows, 64), 3e38, np.float32)
    path = write_small(tmp_path / "m.gguf", small, raw={"blk.0.ffn_up": raw.view(np.uint8)})
    with pytest.raises(ModelFormatError, match=r"too large for|no finite|not finite|no numbers") as raised:
        convert(path, tmp_path / "out", CONVERSIONS[what], tokens=lambda tokenizer: TOKENS[:1024])
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_statistics_match_inputs(family: Callable[[str], Model]) -> None:
    """The first layer's inputs are normed embeddings, which are known without running anything."""
    model = family("llama")
    found = collect(model.file, model.spec, TOKENS)
    weights = {name: _floats(model, name) for name in ("token_embd.weight", "blk.0.attn_norm.weight")}
    x = weights["token_embd.weight"][TOKENS[:2048]]
    x = x / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + 1e-5) * weights["blk.0.attn_norm.weight"]
    for name in ("attn_q", "attn_k", "attn_v"):
        one = found[f"blk.0.{name}"]
        np.testing.assert_allclose(one.largest, np.abs(x).max(axis=0), rtol=1e-4)
        np.testing.assert_allclose(one.mean, np.abs(x).mean(axis=0), rtol=1e-4)
        np.testing.assert_allclose(one.square, np.square(x).mean(axis=0), rtol=1e-4)
    assert len(found) == 2 * 7 + 1


def _floats(model: Model, name: str) -> FloatArray:
    info = model.file.tensors[name]
    return model.file.tensor_bytes(info).view(np.float32).reshape(info.shape[::-1])


def test_mixture_meets_size_and_larger_is_better(family: Callable[[str], Model], tmp_path: Path) -> None:
    model, errors = family("llama"), []
    tokens: IntArray = TOKENS[:256]
    exact = predicted(model)
    for kind in ("Q4_0", "Q5_1"):
        quantize_gguf(model.file, model.spec, tmp_path / "q.gguf", Settings(type=kind, method="rtn", **WHOLE))
        limit = (tmp_path / "q.gguf").stat().st_size + 32 * len(model.file.tensors)
        settings, mixture = mix_types(
            model.file, model.spec, Settings(method="importance", **WHOLE), tokens, nbytes=limit
        )
        quantize_gguf(model.file, model.spec, tmp_path / "m.gguf", settings, TOKENS)
        assert (tmp_path / "m.gguf").stat().st_size <= limit
        assert mixture.kl > 0
        errors.append(np.abs(predicted(open_model(tmp_path / "m.gguf")) - exact).mean())
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.parametrize("name", ["llama", *(each if each in OFTEN else exhaustive(each) for each in HYBRIDS)])
def test_size_that_is_too_small_names_the_smallest(family: Callable[[str], Model], name: str) -> None:
    """Before anything is measured. Attention of hybrids wants more bits than others, and has no choice."""
    model, steps, settings = family(name), list[float](), Settings(method="importance")
    with pytest.raises(InputError, match=r"make a file of [0-9,]+ bytes: use --target-size=1MiB or more") as raised:
        mix_types(model.file, model.spec, settings, TOKENS[:256], nbytes=1000, outside=AROUND, progress=steps.append)
    assert not steps
    least = int(str(raised.value).split("file of ")[1].split()[0].replace(",", ""))
    mixed, mixture = mix_types(model.file, model.spec, settings, TOKENS[:256], nbytes=least, outside=AROUND)
    types = plan_types(model.file, model.spec, mixed)
    assert sum(nbytes(types[each.name], each.elements) for each in model.file.tensors.values()) <= least
    assert mixture.types


@pytest.mark.parametrize("method", ["best", exhaustive("importance")])
def test_llama_cpp_reads_k_quant_mixtures(method: Any, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    wide = Small(layers=2, hidden=256, heads=4, kv_heads=2, head=64, ffn=256)
    model = open_model(write_small(tmp_path / "wide.gguf", wide))
    room = int(3.6 / 8 * sum(info.elements for info in model.file.tensors.values())) + model.file.data_offset
    settings, mixture = mix_types(
        model.file,
        model.spec,
        Settings(method=method),
        TOKENS[:512],
        nbytes=room,
        kinds=types_of_gguf(),
        outside=AROUND,
    )
    assert {"Q2_K", "Q3_K"} & set(mixture.types.values())
    report = quantize_gguf(model.file, model.spec, tmp_path / "mixed.gguf", settings, TOKENS[:512])
    assert (tmp_path / "mixed.gguf").stat().st_size <= room
    assert {name: report.types[name] for name in mixture.types} == mixture.types
    made = open_model(tmp_path / "mixed.gguf")
    ours, theirs = predicted(made), predicted(made, "llamacpp")
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.998  # llama.cpp rounds activations
    with pytest.raises(UnsupportedError, match="cannot be Q3_K: choose"):  # only mixtures hold rows of other sizes
        plan_types(model.file, model.spec, Settings("Q3_K"))


def test_best_step_for_its_bytes_comes_first() -> None:
    cheap = Stage(("a",), {"Q4_0": 10, "Q5_0": 12, "Q8_0": 20}, {"Q4_0": 1.0, "Q5_0": 0.4, "Q8_0": 0.3})
    dear = Stage(("b", "c"), {"Q4_0": 10, "Q5_0": 12, "Q8_0": 20}, {"Q4_0": 8.0, "Q5_0": 4.0, "Q8_0": 0.1})
    assert allocate([cheap, dear], nbytes=20).types == {"a": "Q4_0", "b": "Q4_0", "c": "Q4_0"}
    assert allocate([cheap, dear], nbytes=22).types == {"a": "Q4_0", "b": "Q5_0", "c": "Q5_0"}
    assert allocate([cheap, dear], nbytes=32).types == {"a": "Q5_0", "b": "Q8_0", "c": "Q8_0"}
    assert allocate([cheap, dear], kl=1.2).types == {"a": "Q4_0", "b": "Q8_0", "c": "Q8_0"}
    with pytest.raises(InputError, match="KL"):
        allocate([cheap, dear], kl=0.1)
