"""PEFT adapters become GGUF adapters: with one, the model computes what its checkpoint computes with W + α/r · B A."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import all_logits
from hf_folders import FOLDERS, Tensors, complaint, copy_folder, read_folder, write_tensors
from peft_adapters import FOLDER, KINDS, TOKENS
from peft_adapters import OUT as PEFT

from edge.converters.convert import Conversion, convert, find_source
from edge.converters.gguf.quantize import Settings
from edge.converters.huggingface.adapter import convert_adapter
from edge.converters.huggingface.reader import convert_folder
from edge.model.adapters.lora import open_lora, read_adapter
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import Model, open_model
from edge.types import AnyArray, FloatArray

RANK, ALPHA = 4, 6.0
PROJECTIONS = ("_proj.weight", "c_attn.weight", "c_fc.weight", "c_proj.weight")  # gpt2's are transposed


def as_f32(dtype: str, array: AnyArray) -> FloatArray:
    return (array.astype(np.uint32) << 16).view(np.float32) if dtype == "BF16" else array.astype(np.float32)


def write_peft(folder: Path, checkpoint: Path, **config: Any) -> Tensors:
    """A random adapter of every projection; returns the checkpoint with it merged, float32."""
    random = np.random.default_rng(1)
    pairs: Tensors = {}
    merged: Tensors = {}
    factor = ALPHA / (math.sqrt(RANK) if config.get("use_rslora") else RANK)
    for name, (dtype, array) in read_folder(checkpoint).items():
        weight = as_f32(dtype, array)
        if name.endswith(PROJECTIONS) and weight.ndim == 2:
            transposed = checkpoint.name == "gpt2"
            rows, columns = weight.shape[::-1] if transposed else weight.shape
            a = (random.standard_normal((RANK, columns)) / np.sqrt(columns)).astype(np.float32)
            b = (random.standard_normal((rows, RANK)) * 0.1).astype(np.float32)
            root = f"base_model.model.{name.removesuffix('.weight')}"
            pairs |= {f"{root}.lora_A.weight": ("F32", a), f"{root}.lora_B.weight": ("F32", b)}
            change = factor * (b @ a)
            weight = weight + (change.T if transposed else change)
        merged[name] = ("F32", weight)
    folder.mkdir()
    write_tensors(folder / "adapter_model.safetensors", pairs)
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "rank_pattern": {}, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return merged


def logits(model: Model, adapter: Path | None = None) -> FloatArray:
    lora = open_lora([LoraFile(adapter)] if adapter else [], model.file, model.spec)
    return all_logits(model, TOKENS, lora=lora)


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", {}), ("llama", {"use_rslora": True}), ("qwen2", {}), ("phi3", {}), ("gemma3_text", {}), ("gpt2", {})],
)
def test_adapter_equals_merged_checkpoint(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    merged = write_peft(tmp_path / "peft", FOLDERS / name, **config)
    folder = copy_folder(name, tmp_path / "merged")
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    write_tensors(folder / "model.safetensors", merged)
    convert_folder(FOLDERS / name, tmp_path / "base.gguf", type="F32")
    convert_folder(folder, tmp_path / "merged.gguf", type="F32")
    base = open_model(tmp_path / "base.gguf")
    convert_adapter(tmp_path / "peft", base, tmp_path / "a.gguf")
    expected = logits(open_model(tmp_path / "merged.gguf"))
    assert np.abs(expected - logits(base)).max() > 0.3
    np.testing.assert_allclose(logits(base, tmp_path / "a.gguf"), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_adapters_give_peft_s_logits(kind: str, tmp_path: Path) -> None:
    convert_folder(FOLDERS / FOLDER.get(kind, "llama"), tmp_path / "base.gguf", type="F32")
    base = open_model(tmp_path / "base.gguf")
    convert_adapter(PEFT / kind, base, tmp_path / "a.gguf")
    wanted = Conversion("gguf", lora=(LoraFile(tmp_path / "a.gguf"),))
    convert(tmp_path / "base.gguf", tmp_path / "merged.gguf", wanted)
    with np.load(PEFT / "logits.npz") as golden:
        expected = golden[kind]
    assert np.abs(expected - logits(base)[-len(expected) :]).max() > 0.3
    merged = logits(open_model(tmp_path / "merged.gguf"))[-len(expected) :]
    close = 1e-4 if kind in FOLDER else 1e-3
    np.testing.assert_allclose(merged, expected, rtol=0, atol=close)
    if kind in ("dora", "gemma4-whole"):
        assert "merge it with edge convert" in complaint(lambda: logits(base, tmp_path / "a.gguf"))
    else:
        found = logits(base, tmp_path / "a.gguf")[-len(expected) :]
        np.testing.assert_allclose(found, expected, rtol=0, atol=close)


def test_changed_base_must_be_unquantized(tmp_path: Path) -> None:
    convert(FOLDERS / "llama", tmp_path / "q.gguf", Conversion("gguf", settings=Settings(type="Q8_0", method="rtn")))
    base = open_model(tmp_path / "q.gguf")
    said = complaint(lambda: convert_adapter(PEFT / "pissa", base, tmp_path / "a.gguf"))
    assert "name it unquantized" in said


def test_peft_folder_names_its_conversion() -> None:
    assert f"edge convert {PEFT / 'dora'} adapter.gguf" in complaint(lambda: read_adapter(PEFT / "dora"))


@pytest.mark.parametrize(("config", "said"), [
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
    ({"init_lora_weights": "corda"}, "merge it with PEFT's merge_and_unload"),
    ({"alpha_pattern": {"(": 2}}, "is no pattern"), ({"peft_type": "IA3"}, "peft_type is 'IA3'"), ({"r": 0}, "r is 0"),
    ({"lora_alpha": "x"}, "lora_alpha is 'x'"), ({"peft_type": "CARTRIDGE"}, "should be its only tensor"),
])  # fmt: skip
def test_unsupported_peft_parts_are_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_peft(tmp_path / "peft", FOLDERS / "llama", **config)
    convert_folder(FOLDERS / "llama", tmp_path / "base.gguf")
    base = open_model(tmp_path / "base.gguf")
    found = complaint(lambda: convert_adapter(tmp_path / "peft", base, tmp_path / "a.gguf"))
    assert said in found
    assert "\n" not in found
    assert not (tmp_path / "a.gguf").exists()


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    write_peft(tmp_path / "peft", FOLDERS / "gpt2")
    convert_folder(FOLDERS / "llama", tmp_path / "base.gguf")
    base = open_model(tmp_path / "base.gguf")
    assert "changes no matrix of a llama model" in complaint(
        lambda: convert_adapter(tmp_path / "peft", base, tmp_path / "a.gguf")
    )
    assert "state its model in GGUF with --base" in complaint(lambda: find_source(tmp_path / "peft"))
