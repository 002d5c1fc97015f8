"""Pruning takes what does nothing, and says what it took: models with idle layers and channels answer as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, all_logits, mean_kl

from edge.converters.pruning.prune import Pruning, check_pruning, prune_gguf
from edge.converters.pruning.repair import repair
from edge.converters.quantizers.rtn import quantize
from edge.errors import InputError, UnsupportedError
from edge.formats.blocks import dequantize
from edge.formats.gguf import TensorInfo, read_gguf
from edge.formats.gguf_writer import Planned, fields_of, write_gguf
from edge.model.model import Model, open_model
from edge.types import AnyArray, FloatArray, IntArray

NAMES = ("llama-gqa-untied", "qwen2", "qwen3", "phi3", "gpt2", "gemma2", "gemma3")
UNIFORM = ("llama-gqa-untied", "qwen2", "qwen3", "phi3", "gpt2")


def idle(name: str, target: Path, change: Callable[[str, FloatArray], FloatArray], kind: str | None = None) -> Model:
    """A golden model with some of its weights changed."""
    file = read_gguf(GOLDEN / f"{name}.gguf")

    def data(info: TensorInfo) -> AnyArray:
        values = dequantize(file.tensor_bytes(info).reshape(info.shape[-1], -1), info.type)
        return quantize(change(info.name, values), kinds(info))

    def kinds(info: TensorInfo) -> str:
        return kind if kind and len(info.shape) == 2 and info.shape[0] % 32 == 0 else info.type

    planned = [Planned(info.name, info.shape, kinds(info)) for info in file.tensors.values()]
    vectors = {info.name for info in file.tensors.values() if len(info.shape) == 1}
    write_gguf(
        target, fields_of(file), planned,
        (file.tensor_bytes(info) if info.name in vectors else data(info) for info in file.tensors.values()),
    )  # fmt: skip
    return open_model(target)


def tokens_for(model: Model, count: int = 256) -> IntArray:
    return np.random.default_rng(5).integers(3, model.spec.vocab, count).astype(np.int32)


@pytest.mark.parametrize("name", NAMES)
def test_removing_idle_channels_keeps_logits(name: str, tmp_path: Path) -> None:
    whole = read_gguf(GOLDEN / f"{name}.gguf")
    ffn = open_model(whole.path).spec.ffn
    gone = np.random.default_rng(3).permutation(ffn)[: ffn // 2]

    def change(tensor: str, values: FloatArray) -> FloatArray:
        if tensor.endswith("ffn_down.weight"):
            values[:, gone] = 0
        return values

    model = idle(name, tmp_path / "idle.gguf", change)
    tokens = tokens_for(model)
    said = prune_gguf(model.file, model.spec, tmp_path / "pruned.gguf", Pruning(ffn=0.5), tokens)
    pruned = open_model(tmp_path / "pruned.gguf")
    assert said.ffn == (ffn, pruned.spec.ffn)
    assert pruned.spec.ffn == max(1, round(ffn / 64)) * 32
    assert said.parameters == (model.spec.parameters, pruned.spec.parameters)
    np.testing.assert_allclose(all_logits(pruned, tokens[:24]), all_logits(model, tokens[:24]), atol=1e-4)


@pytest.mark.parametrize("name", UNIFORM)
def test_removing_an_idle_layer_keeps_logits(name: str, tmp_path: Path) -> None:
    def change(tensor: str, values: FloatArray) -> FloatArray:
        silent = ("blk.1.attn_output.weight", "blk.1.ffn_down.weight")
        return np.zeros_like(values) if tensor in silent and name != "gpt2" else values

    model = idle(name, tmp_path / "idle.gguf", change)
    tokens = tokens_for(model)
    said = prune_gguf(model.file, model.spec, tmp_path / "pruned.gguf", Pruning(layers=1), tokens)
    pruned = open_model(tmp_path / "pruned.gguf")
    assert pruned.spec.layers == model.spec.layers - 1
    assert len(said.importance) == model.spec.layers
    assert said.importance[said.layers[0]] == min(said.importance)
    if name != "gpt2":  # its biases are vectors, and still say something
        assert said.layers == (1,)
        assert min(said.importance) == pytest.approx(0, abs=1e-6)
        np.testing.assert_allclose(all_logits(pruned, tokens[:24]), all_logits(model, tokens[:24]), atol=1e-4)


def test_llama_cpp_runs_pruned_models(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = open_model(GOLDEN / "qwen2.gguf")
    tokens = tokens_for(model)
    prune_gguf(model.file, model.spec, tmp_path / "pruned.gguf", Pruning(layers=1, ffn=0.3), tokens)
    pruned = open_model(tmp_path / "pruned.gguf")
    theirs, ours = (all_logits(pruned, tokens[:24], engine) for engine in ("llamacpp", "reference"))
    np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_quantized_rows_that_lose_columns_become_f16(tmp_path: Path) -> None:
    model = idle("llama-gqa-untied", tmp_path / "q8.gguf", lambda _, values: values, "Q8_0")
    prune_gguf(model.file, model.spec, tmp_path / "pruned.gguf", Pruning(ffn=0.5), tokens_for(model))
    types = {name.split(".")[2]: info.type for name, info in open_model(tmp_path / "pruned.gguf").file.tensors.items()
             if name.startswith("blk.0.")}  # fmt: skip
    assert (types["ffn_up"], types["ffn_down"], types["attn_q"]) == ("Q8_0", "F16", "Q8_0")


@pytest.mark.parametrize(("pruning", "said"), [
    (Pruning(layers=99), "one must stay"), (Pruning(layers=-1), "one must stay"),
    (Pruning(ffn=1.0), "from 0 to below 1"), (Pruning(ffn=-0.1), "from 0 to below 1"),
    (Pruning(ffn=float("nan")), "from 0 to below 1"),
])  # fmt: skip
def test_unprunable_models_are_refused(pruning: Pruning, said: str) -> None:
    spec = open_model(GOLDEN / "llama-gqa-untied.gguf").spec
    with pytest.raises(InputError, match=said):
        check_pruning(spec, pruning)
    for name in ("gemma2", "smollm3"):
        with pytest.raises(UnsupportedError, match="take turns"):
            check_pruning(open_model(GOLDEN / f"{name}.gguf").spec, Pruning(layers=1))


@pytest.mark.train
def test_repaired_model_predicts_more_as_whole_one_does(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    whole, target, shown = open_model(GOLDEN / "llama-gqa-untied.gguf"), tmp_path / "repaired.gguf", list[float]()
    prune_gguf(whole.file, whole.spec, tmp_path / "pruned.gguf", Pruning(layers=1), tokens_for(whole))
    pruned, tokens = open_model(tmp_path / "pruned.gguf"), tokens_for(whole, 2048)
    repair(whole.file, pruned.file, target, tokens, steps=60, progress=shown.append)
    assert shown == [pytest.approx((step + 1) / 60) for step in range(60)]
    models = whole, pruned, open_model(target)
    exact, before, after = (all_logits(each, tokens[:200], capacity=200) for each in models)
    assert mean_kl(exact, after) < 0.9 * mean_kl(exact, before)


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.999])
def test_any_share_leaves_whole_blocks(share: float) -> None:
    spec = open_model(GOLDEN / "llama-gqa-untied.gguf").spec
    kept = check_pruning(spec, Pruning(0, share))
    assert kept % 32 == 0 < kept <= spec.ffn
