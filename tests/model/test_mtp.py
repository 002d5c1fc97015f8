"""Layers for multi-token prediction (`nextn`): models run as without them, in our engines and in llama.cpp."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, Engines, exhaustive, load_engine
from fallbacks import logits_of
from test_cli import edge_json
from test_gguf_file import GGUF

from edge.converters.gguf.ggml import quantize_file
from edge.converters.gguf.quantize import Settings, quantize_gguf
from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.writer import write_folder
from edge.converters.onnx.writer import write_onnx
from edge.converters.pruning.prune import Pruning, plan_pruning
from edge.formats.gguf import read_gguf
from edge.formats.gguf_writer import write_outline
from edge.model.model import open_model
from edge.model.reader import read_spec
from edge.model.structure.mtp import mtp_tensors
from edge.model.tensors import find_tensors

U32, ARRAY, F32 = 4, 9, 0
SPECIAL = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight", "nextn.shared_head_norm.weight")


def with_mtp(path: Path, name: str, layers: int = 1, hidden: int = 16) -> Path:
    """A golden model with layers for multi-token prediction, at random, in the shape of its last layer."""
    file, random = GGUF.read(GOLDEN / f"{name}.gguf"), np.random.default_rng(layers)
    _, count = file.metadata[f"{name}.block_count"]
    last = f"blk.{count - 1}."
    shapes = {str(key).removeprefix(last): each[0] for key, each in file.tensors.items() if str(key).startswith(last)}
    shapes |= dict(zip(SPECIAL, [(2 * hidden, hidden), *[(hidden,)] * 3], strict=True))
    for layer in range(count, count + layers):
        for stem, shape in shapes.items():
            values = random.standard_normal(shape[::-1]).astype("<f4")
            file.tensors[f"blk.{layer}.{stem}"] = (shape, F32, values.tobytes())
    file.metadata |= {
        f"{name}.{key}": (U32, value)
        for key, value in {"block_count": count + layers, "nextn_predict_layers": layers}.items()
    }
    kinds = f"{name}.attention.recurrent_layers"
    if kinds in file.metadata:  # llama.cpp has one for each layer
        kind, (item, flags) = file.metadata[kinds]
        file.metadata[kinds] = kind, (item, [*flags, *[False] * layers])
    return file.write(path)


@pytest.mark.parametrize(
    ("name", "layers", "backend"),
    [
        ("qwen35", 2, "reference"), ("qwen35", 1, "llamacpp"), ("qwen35moe", 1, "reference"),
        exhaustive("qwen35", 1, "cpu"), exhaustive("qwen35moe", 2, f"gpu@{SOME_GPU}"),
    ],
)  # fmt: skip
def test_mtp_layers_change_no_logits(name: str, layers: int, backend: str, tmp_path: Path, engines: Engines) -> None:
    plain, other = open_model(GOLDEN / f"{name}.gguf"), open_model(with_mtp(tmp_path / "m.gguf", name, layers))
    assert replace(other.spec, mtp=None) == plain.spec
    assert find_tensors(other.file, other.spec) == find_tensors(plain.file, plain.spec)
    tokens = np.random.default_rng(1).integers(3, plain.spec.vocab, 30).astype(np.int32)
    expected, found = (
        logits_of(engines(load_engine(model, backend, "f32", capacity=64)), tokens, [20, 1, 9])
        for model in (plain, other)
    )
    np.testing.assert_array_equal(found, expected)


def test_quantized_files_keep_mtp_layers(tmp_path: Path) -> None:
    """Rounded plainly, whatever the method; all else is as in the file without them."""
    settings = Settings("Q4_0", "awq")
    ids = np.resize(np.arange(3, 250, dtype=np.int32), 600)
    found = []
    for name, path in (("plain", GOLDEN / "qwen35.gguf"), ("mtp", with_mtp(tmp_path / "m.gguf", "qwen35"))):
        file, made = read_gguf(path), tmp_path / f"{name}.gguf"
        quantize_gguf(file, read_spec(file), made, settings, ids)
        found.append(read_gguf(made))
    plain, other = found
    assert replace(read_spec(other), mtp=None) == replace(read_spec(plain), name=read_spec(other).name)
    for name, info in plain.tensors.items():
        np.testing.assert_array_equal(other.tensor_bytes(other.tensors[name]), plain.tensor_bytes(info))
    kinds = {name.removeprefix("blk.2."): info.type for name, info in mtp_tensors(other).items()}
    assert len(kinds) == 15
    wanted = {"nextn.eh_proj.weight": settings.type, "nextn.enorm.weight": "F32", "attn_q.weight": "F16"}  # rows of 16
    assert kinds.items() >= wanted.items()


def test_llama_cpp_quantizes_mtp_layers(tmp_path: Path) -> None:
    file = read_gguf(with_mtp(tmp_path / "m.gguf", "qwen35"))
    quantize_file(file, tmp_path / "q.gguf", "Q4_K_M")
    made = read_gguf(tmp_path / "q.gguf")
    assert made.tensors.keys() == file.tensors.keys()
    assert read_spec(made).layers == 2


def test_other_formats_drop_mtp_layers(tmp_path: Path) -> None:
    plain = read_gguf(GOLDEN / "qwen3.gguf")
    file = read_gguf(with_mtp(tmp_path / "m.gguf", "qwen3"))
    spec = read_spec(file)
    write_folder(file, spec, tmp_path / "folder")
    convert_folder(tmp_path / "folder", tmp_path / "back.gguf")
    write_onnx(file, spec, tmp_path / "onnx")
    pruned = write_outline(tmp_path / "pruned.gguf", *plan_pruning(file, spec, Pruning(layers=1)))
    for other in (read_gguf(tmp_path / "back.gguf"), open_model(tmp_path / "onnx").file):
        assert other.tensors.keys() == plain.tensors.keys()
    assert read_spec(pruned).layers == 1
    assert not mtp_tensors(pruned)


def test_inspect_shows_mtp_layers(tmp_path: Path) -> None:
    found = edge_json("inspect", str(with_mtp(tmp_path / "m.gguf", "qwen35", 2)), "--json")
    assert (found["spec"]["layers"], found["mtp_layers"], found["mtp_bytes"]) == (2, 2, 2 * 16_832)
