"""Words for what users write for MODEL where edge cannot take it yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge.converters.convert import find_source
from edge.errors import EdgeError, InputError
from edge.model.catalog import find_model


@pytest.mark.parametrize(
    ("name", "says"),
    [
        (
            "HuggingFaceTB/SmolLM2-135M",
            "edge does not download yet: hf download HuggingFaceTB/SmolLM2-135M --local-dir SmolLM2-135M, "
            "then edge convert SmolLM2-135M SmolLM2-135M.gguf, then pass that",
        ),
        ("https://huggingface.co/Qwen/Qwen2-0.5B/tree/main", "hf download Qwen/Qwen2-0.5B --local-dir Qwen2-0.5B"),
        ("hf.co/unsloth/SmolLM2-135M-GGUF:Q4_0", "hf download unsloth/SmolLM2-135M-GGUF .*pass a .gguf file in it"),
        ("https://example.org/model.gguf", "fetch https://example.org/model.gguf and pass the file"),
        ("models/nope.gguf", "no such model file: models/nope.gguf"),
        ("/nope/model", "no such model file"),
        ("llama3.2:1b", "no such model file: llama3.2:1b .installed names: smollm2-135m"),
    ],
)
def test_names_of_what_is_not_here(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for find in (find_model, find_source):
        with pytest.raises(InputError, match=says):
            find(name)


def test_a_folder_that_is_here_is_no_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(InputError, match="no such model file: models/nope"):
        find_model("models/nope")


@pytest.mark.parametrize(
    ("files", "name", "says"),
    [
        (
            ["config.json", "model.safetensors"],
            "",
            "is a Hugging Face folder: edge convert 'my model' 'my model.gguf' f",
        ),
        (
            ["config.json", "model.safetensors"],
            "model.safetensors",
            "belongs to a Hugging Face folder: edge convert 'my",
        ),
        (["config.json"], "config.json", "belongs to a Hugging Face folder"),
        (["edge.json", "model.onnx"], "model.onnx", "is a part of a model: pass its folder, my model$"),
        (["edge.json", "metadata.gguf"], "metadata.gguf", "is a part of a model: pass its folder"),
        (["model-Q4_0.gguf", "z.gguf"], "", "is a folder: pass a file in it, such as my model/model-Q4_0.gguf"),
        (["notes.txt"], "", "is a folder without an edge.json"),
        (["model.safetensors"], "model.safetensors", "holds only weights"),
        (["model.onnx"], "model.onnx", "was not written by edge convert"),
    ],
)
def test_parts_of_models(
    files: list[str], name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path("my model")
    folder.mkdir()
    for each in files:
        (folder / each).touch()
    with pytest.raises(EdgeError, match=says):
        find_model(folder / name)


@pytest.mark.parametrize("beside", ["config.json", "edge.json", "other.txt"])
def test_a_gguf_file_may_lie_anywhere(beside: str, tmp_path: Path) -> None:
    (tmp_path / beside).touch()
    (tmp_path / "m.gguf").touch()
    assert find_model(tmp_path / "m.gguf") == tmp_path / "m.gguf"
