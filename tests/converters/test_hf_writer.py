"""Models as Hugging Face folders: what was read and is written again is the same, and quantized ones become floats.

`make golden` loads folders that are written here in transformers, which must give the golden logits and ids.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from hf_folders import FOLDERS, NAMES, PACKED, read_folder
from small_models import Small, write_small
from test_gguf_file import GGUF, STRING
from test_tokenizer import TEXTS

from edge.converters.huggingface.architectures import of_gguf
from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.writer import write_folder
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.model import Model, open_model


def write(model: Model, folder: Path, **options: Any) -> Path:
    write_folder(model.file, model.spec, folder, **options)
    return folder


# There and back


@pytest.mark.parametrize("name", [*NAMES, *PACKED])
def test_same_weights_bit_for_bit(name: str, tmp_path: Path) -> None:
    """And the same file when they are read again: figures of RoPE are in another layout then, and mean the same."""
    convert_folder(FOLDERS / name, tmp_path / "model.gguf")
    model, again = open_model(tmp_path / "model.gguf"), tmp_path / "again" / name  # general.name is the folder's
    again.parent.mkdir()
    found = read_folder(write(model, again))
    weights = {key.removeprefix("language_model."): each for key, each in read_folder(FOLDERS / name).items()}
    weights = {key: each for key, each in weights.items() if not key.startswith(("vision_", "multi_modal_"))}
    if name not in PACKED:
        assert found.keys() == weights.keys()
        for key, (dtype, array) in weights.items():
            assert (key, found[key][0]) == (key, dtype)
            np.testing.assert_array_equal(found[key][1], array)
    convert_folder(again, tmp_path / "again.gguf")
    back = open_model(tmp_path / "again.gguf")
    assert back.spec == model.spec
    assert list(back.file.tensors) == list(model.file.tensors)
    for key, info in model.file.tensors.items():
        np.testing.assert_array_equal(back.file.tensor_bytes(back.file.tensors[key]), model.file.tensor_bytes(info))
    fields = {key: value for key, value in model.file.metadata.items() if not key.startswith("tokenizer.ggml.")}
    for key, value in fields.items():
        assert back.file.metadata[key] == (pytest.approx(value, rel=1e-6) if isinstance(value, float) else value), key
    for key in model.file.metadata.keys() - fields.keys():
        assert key in back.file.metadata


def is_written(path: Path) -> bool:
    try:
        of_gguf(str(read_gguf(path).metadata["general.architecture"]))
    except UnsupportedError:
        return False
    return path.stem not in ("llama-rope-scaled", "llama-llama3")  # whose parameters of RoPE are not in the file


@pytest.mark.parametrize("path", [
    exhaustive(each, id=each.stem) if each.stem in NAMES else pytest.param(each, id=each.stem)
    for each in sorted(GOLDEN.glob("*.gguf")) if is_written(each)
])  # fmt: skip
def test_files_of_others_there_and_back(path: Path, tmp_path: Path) -> None:
    model = open_model(path)
    convert_folder(write(model, tmp_path / path.stem), tmp_path / "model.gguf")
    back = open_model(tmp_path / "model.gguf")
    assert replace(back.spec, name=model.spec.name) == model.spec
    assert back.file.tensors.keys() == model.file.tensors.keys()
    for name, info in model.file.tensors.items():
        again = back.file.tensors[name]
        assert (again.shape, again.type) == (info.shape, info.type)
        np.testing.assert_array_equal(back.file.tensor_bytes(again), model.file.tensor_bytes(info))
    for text in TEXTS:
        np.testing.assert_array_equal(back.tokenizer.encode(text), model.tokenizer.encode(text))
    assert back.file.metadata.get("tokenizer.chat_template") == model.file.metadata.get("tokenizer.chat_template")


# Quantized models, and vectors that are finer than matrices


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q6_K", "Q8_0", "IQ4_NL"])
@pytest.mark.parametrize("wanted", ["F32", "F16"])
def test_quantized_weights_become_floats(kind: str, wanted: str, tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "small.gguf", Small(hidden=256, head=64, ffn=512, types=kind)))
    found = read_folder(write(model, tmp_path / "folder", type=wanted))
    for ours, theirs in (("ffn_down", "mlp.down_proj"), ("attn_v", "self_attn.v_proj")):
        info = model.file.tensors[f"blk.0.{ours}.weight"]
        values = dequantize(model.file.tensor_bytes(info).reshape(info.shape[1], -1), GGMLQuantizationType[kind])
        dtype, array = found[f"model.layers.0.{theirs}.weight"]
        assert dtype == wanted
        np.testing.assert_array_equal(array, values.astype(array.dtype))
    said = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert said["torch_dtype"] == {"F32": "float32", "F16": "float16"}[wanted]
    convert_folder(tmp_path / "folder", tmp_path / "again.gguf")
    assert open_model(tmp_path / "again.gguf").spec.parameters == model.spec.parameters


# What is refused, with nothing left behind


def test_models_without_hugging_face_settings(tmp_path: Path) -> None:
    def changed(edit: Any, path: Path = GOLDEN / "llama-linear.gguf") -> Model:
        gguf = GGUF.read(path)
        edit(gguf)
        return open_model(gguf.write(tmp_path / "model.gguf"))

    def renamed(gguf: GGUF) -> None:
        """As falcon, which our converters do not know."""
        gguf.metadata = {
            str(key).replace("llama.", "falcon."): value for key, value in gguf.metadata.items()
        } | {"general.architecture": (STRING, "falcon")}  # fmt: skip

    def with_odd_tensor(gguf: GGUF) -> None:
        gguf.tensors["blk.0.attn_norm_2.weight"] = ((32,), 0, bytes(128))

    def with_some_biases(gguf: GGUF) -> None:
        gguf.tensors["blk.0.attn_q.bias"] = ((64,), 0, bytes(256))

    for edit, match in (
        (renamed, "falcon models cannot be written"),
        (with_odd_tensor, "no tensor like"),
        (with_some_biases, "would not be readable.* biases of attn_k everywhere or nowhere"),
    ):
        with pytest.raises(UnsupportedError, match=match):
            write(changed(edit), tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf"}


def test_existing_folders_are_replaced_by_force_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = open_model(GOLDEN / "qwen2.gguf"), tmp_path / "folder"
    write(model, folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match="--force replaces it"):
        write(model, folder)
    seen: list[float] = []
    write(model, folder, force=True, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}
    (folder / "diary.txt").write_text("mine")
    with pytest.raises(InputError, match="holds other files"):
        write(model, folder, force=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="no folder"):
        write(model, tmp_path / "file")
    with pytest.raises(InputError, match="cannot be written"):
        write(model, tmp_path / "file" / "folder")
    with pytest.raises(InputError, match="Q4_0"):
        write(model, tmp_path / "new", type="Q4_0")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left"):
        write(model, tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_damaged_model_leaves_nothing(tmp_path: Path) -> None:
    gguf = GGUF.read(GOLDEN / "qwen2.gguf")
    gguf.write(tmp_path / "model.gguf")
    model = open_model(tmp_path / "model.gguf")
    with open(tmp_path / "model.gguf", "r+b") as file:
        file.truncate((tmp_path / "model.gguf").stat().st_size - 1000)
    with pytest.raises(ModelFormatError, match="ends before"):
        write(model, tmp_path / "folder")
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf"}
