"""`edge inspect`: against the `gguf` package's reader and llama.cpp, and hostile files."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, load_engine
from gguf import GGUFReader
from small_models import Small, write_small
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.cli.inspect import _about
from edge.converters.huggingface.writer import write_folder
from edge.errors import EdgeError
from edge.formats.gguf_writer import Field, Planned, write_gguf
from edge.lab.inspection import inspect_model
from edge.model.model import open_model


@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma3", "gpt2", "phi3-longrope", "spm"])
def test_figures_match_another_reader(name: str) -> None:
    path = GOLDEN / f"{name}.gguf"
    found, reader = inspect_model(path), GGUFReader(path)
    fields: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
    assert found.architecture == fields["general.architecture"]
    assert found.parameters == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert sum(each.bytes for each in found.types) == sum(int(tensor.n_bytes) for tensor in reader.tensors)
    assert sum(each.share for each in found.types) == pytest.approx(1)
    assert found.vocabulary.tokens == len(fields["tokenizer.ggml.tokens"])
    assert found.vocabulary.tokenizer == fields["tokenizer.ggml.model"]
    assert found.vocabulary.known
    for name, (index, text) in found.vocabulary.special.items():
        assert index == fields[f"tokenizer.ggml.{name}_token_id"]
        assert text == fields["tokenizer.ggml.tokens"][index]
    assert found.template == fields.get("tokenizer.chat_template")
    assert {each.engine for each in found.engines} == {"cpu", "gpu", "llamacpp", "onnx", "reference"}


@pytest.mark.parametrize(
    ("backend", "kv_dtypes"), [("cpu", ["int4"]), ("llamacpp", ["f16", "f32"]), ("reference", ["f32"])]
)
def test_bytes_per_token_equal_the_engines_rows(backend: str, kv_dtypes: list[str], tmp_path: Path) -> None:
    path = write_small(tmp_path / "small.gguf", Small(layers=2, context=4096))
    said = {each.engine: each.kv_bytes for each in inspect_model(path).engines}[backend]
    for kv_dtype in kv_dtypes:
        sizes = []
        for capacity in (512, 1024):
            engine = load_engine(open_model(path), backend, kv_dtype, capacity=capacity)
            sizes.append(engine.kv.nbytes)
            engine.close()
        assert said[kv_dtype] == (sizes[1] - sizes[0]) // 512


def test_stamps_follow_content(tmp_path: Path) -> None:
    def nudge(weights: dict[str, np.ndarray]) -> None:
        weights["blk.0.ffn_up"] *= np.float32(1.5)

    for folder in "ab":
        (tmp_path / folder).mkdir()
    first = inspect_model(write_small(tmp_path / "a" / "x.gguf", Small()))
    same = inspect_model(write_small(tmp_path / "b" / "x.gguf", Small()), sha256=True)
    other = inspect_model(write_small(tmp_path / "x.gguf", Small(), nudge))
    assert first.stamp == same.stamp != other.stamp
    assert first.sha256 == {}
    assert same.sha256 == {"x.gguf": hashlib.sha256(same.path.read_bytes()).hexdigest()}


def test_hugging_face_folders_are_shown_as_gguf(tmp_path: Path) -> None:
    source, folder = open_model(GOLDEN / "qwen2.gguf"), tmp_path / "hf"
    write_folder(source.file, source.spec, folder)
    found, original = inspect_model(folder), inspect_model(source.path)
    assert found.format == "Hugging Face folder"
    assert (found.spec.layers, found.spec.heads, found.spec.network) == (
        original.spec.layers, original.spec.heads, original.spec.network,
    )  # fmt: skip
    assert (found.parameters, found.types) == (original.parameters, original.types)
    assert found.vocabulary.tokens == original.vocabulary.tokens
    assert found.bytes == sum(path.stat().st_size for path in folder.iterdir())
    assert found.engines == original.engines
    before = found.stamp
    with open(folder / "model.safetensors", "r+b") as weights:
        weights.seek(0, 2)
        weights.write(b"x")
    with pytest.raises(EdgeError):
        inspect_model(folder)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1])
    assert inspect_model(folder).stamp == before
    shown = edge("inspect", str(folder))
    assert shown.returncode == 0, shown.stderr
    assert "once converted" in shown.stdout


def test_other_architectures_can_be_looked_at(tmp_path: Path) -> None:
    """Tensors are listed even of models that no engine runs; control characters of a file are not printed."""
    fields: dict[str, Field] = {
        "general.architecture": "mamba\x1b[2J", "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "\x1b]0;title\x07"], "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.bos_token_id": np.uint32(7), "tokenizer.chat_template": "\x1b[31m{{ messages }}",
    }  # fmt: skip
    write_gguf(tmp_path / "m.gguf", fields, [Planned("a", (32, 2), "F16")], [np.zeros((2, 32), np.float16)])
    shown = edge("inspect", str(tmp_path / "m.gguf"))
    assert shown.returncode == 0, shown.stderr
    assert "is not supported yet" in shown.stdout
    assert "\x1b" not in shown.stdout
    assert "\x07" not in shown.stdout
    said = edge_json("inspect", str(tmp_path / "m.gguf"), "--json")
    assert said["spec"] is None
    assert said["engines"] == []
    assert said["bits_per_weight"] == 16
    assert said["vocabulary"]["special"] == {"eos": [1, "\x1b]0;title\x07"]}


def test_encoder_of_pictures() -> None:
    found = inspect_model(GOLDEN / "towers" / "smolvlm.gguf")
    assert (found.eyes.models, found.eyes.rows, found.eyes.example) == (("llama",), (4, 20), (20, 80))
    assert ["a picture", "4 to 20 tokens (by default at most 20), from patches of 8 × 8 pixels"] in _about(found)
