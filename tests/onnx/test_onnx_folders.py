"""Folders that are not what `edge convert` wrote: each gets a typed error of one line before ONNX Runtime sees a byte.

Whoever sends a folder can seal it with hashes of their own, and so do these tests.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Engines, load_engine, open_golden
from test_architectures import open_family

from edge.backends.onnx.folders import folder_key
from edge.backends.onnx.graph.builder import make_graph
from edge.backends.onnx.graph.context import KV_TYPES
from edge.backends.onnx.graph.forms import Int8
from edge.backends.onnx.graph.layout import Method, make_layout
from edge.backends.onnx.providers import CPU
from edge.backends.onnx.session import open_session
from edge.converters.onnx.writer import write_onnx
from edge.errors import EdgeError, EngineError
from edge.formats.onnx_folder import MANIFEST, METADATA, WEIGHTS
from edge.model.model import open_model
from edge.model.tensors import find_network
from edge.storage import cache
from edge.types import FloatArray

onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
OUTLIERS = Method("llm-int8", forms={"blk.0.ffn_up": Int8((1, 3))})


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("sound") / "model", open_golden("llama-one-layer").model
    write_onnx(model.file, model.spec, folder, method=OUTLIERS)
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "model"))


def seal(folder: Path) -> None:
    """Make edge.json say what the files are, as an attacker would."""
    said = json.loads((folder / MANIFEST).read_bytes())
    for name, record in said["files"].items():
        content = (folder / name).read_bytes()
        record |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(said))


def refusal(folder: Path, dtype: str = "f32") -> str:
    with pytest.raises(EdgeError) as error:
        load_engine(open_model(folder), "onnx", dtype)
    message = str(error.value)
    assert message.isprintable()
    assert len(message) < 500 + len(str(folder))
    return message


def test_graphs_are_the_bytes_that_onnx_itself_would_write(tmp_path: Path) -> None:
    for name in ("llama-one-layer", "gemma3", "gpt2", "phi3-longrope"):
        model = open_family(name).model if name != "llama-one-layer" else open_golden(name).model
        layout = make_layout(model.file, model.spec, OUTLIERS)
        for kv_dtype in KV_TYPES:
            graph = make_graph(layout, model.spec, find_network(model.spec), kv_dtype, True, WEIGHTS)
            assert onnx.load_model_from_string(graph).SerializeToString() == graph


def test_folder_runs_without_the_onnx_package(folder: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)  # importing it fails
    assert np.isfinite(
        engines(load_engine(open_model(folder), "onnx", "f32")).forward(np.arange(5, dtype=np.int32))
    ).all()


def test_onnx_runtimes_refusal_raises_one_line(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="ONNX Runtime cannot load it"):
        open_session(bytes(100), tmp_path, CPU, 1)


# Graphs


@pytest.mark.parametrize("change", [
    lambda data: b"", lambda data: data + data, lambda data: data + b"\0", lambda data: data[:-1],
    lambda data: data[:-1] + bytes([data[-1] ^ 1]),
])  # fmt: skip
def test_graphs_of_others_are_refused(change: Callable[[bytes], bytes], folder: Path) -> None:
    graph = folder / "model.int8.onnx"
    graph.write_bytes(change(graph.read_bytes()))
    seal(folder)
    assert "model.int8.onnx: not the graph that this version of edge writes" in refusal(folder, "int8")


# Weights and hashes


def flip(path: Path) -> None:
    """One bit, with the times that anyone can set kept."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("name", [WEIGHTS, METADATA, "model.onnx"])
def test_flipped_bit_is_noticed(name: str, folder: Path, engines: Engines) -> None:
    engines(load_engine(open_model(folder), "onnx", "f32"))
    flip(folder / name)
    assert f"{name}: not the file that was written (its hash differs)" in refusal(folder)


def test_weights_that_are_no_numbers_leave_no_scales(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(folder.parent / "cache"))
    np.full((folder / WEIGHTS).stat().st_size // 4, np.nan, np.float32).tofile(folder / WEIGHTS)
    seal(folder)
    assert "no numbers" in refusal(folder, "int8")
    assert not [entry for entry in cache.entries() if entry.path.name.endswith("scales")]


def test_folder_cannot_spoil_the_scales_of_another(
    folder: Path, sound: Path, engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are others, and it claims to be the other one; or its header is, with the same weights."""

    def scales(folder: Path) -> FloatArray:
        return engines(load_engine(open_model(folder), "onnx", "int8")).kv.store.scales

    monkeypatch.setenv("EDGE_CACHE", str(folder.parent / "cache"))
    manifest, weights = (folder / MANIFEST).read_bytes(), np.fromfile(folder / WEIGHTS, np.float32)
    with np.errstate(all="ignore"):  # they are not all floats
        np.where(np.abs(weights) < 1e3, 3 * weights, weights).tofile(folder / WEIGHTS)
    assert "its hash differs" in refusal(folder, "int8")
    seal(folder)
    hostile = scales(folder)
    (folder / MANIFEST).write_bytes(manifest)
    assert "its hash differs" in refusal(folder, "int8")
    assert np.abs(hostile / scales(sound) - 1).max() > 0.1

    weights.tofile(folder / WEIGHTS)
    metadata, base = folder / METADATA, b"rope.freq_base" + bytes([6, 0, 0, 0])  # a float follows
    before = metadata.read_bytes()
    at = before.index(base) + len(base)
    metadata.write_bytes(before[:at] + np.float32(77).tobytes() + before[at + 4 :])
    seal(folder)
    assert open_model(folder).spec.rope_base == 77
    assert folder_key(open_model(folder).file) != folder_key(open_model(sound).file)


# edge.json


def put(*place: Any) -> Callable[[Any], None]:
    """Another value at a place of edge.json: keys, then the value."""
    *path, last, value = place

    def change(said: Any) -> None:
        for key in path:
            said = said[key]
        said[last] = value

    return change


MANIFESTS: dict[str, Callable[[Any], None]] = {
    "infinite size": put("files", WEIGHTS, "bytes", float("inf")),
    "no hash": put("files", WEIGHTS, "sha256", None),
    "NUL in a name": put("files", "a\0b", {"bytes": 1, "sha256": "0" * 64}),
    "many files": put("files", {f"file{i}": {"bytes": 1, "sha256": "0" * 64} for i in range(1000)}),
    "no weights": lambda said: said["files"].pop(WEIGHTS),
    "tensor with a bell": put("tensors", 0, 0, "\a" * 20),
    "unknown type": put("tensors", 0, 1, "F99"),
    "shape of nothing": put("tensors", 0, 2, []),
    "shape that overflows": put("tensors", 0, 2, [1 << 39, 1 << 39]),
    "shape of more than the weights": put("tensors", 0, 2, [32, 1 << 20]),
    "rows of no whole blocks": put("tensors", 0, 1, "Q4_K"),
    "outliers as a number": put("outliers", 5),
    "outliers beyond the row": put("outliers", "blk.0.ffn_up", [1, 1 << 31]),
    "another format": put("format", 10**400),
    "too many outliers": put("outliers", "blk.0.ffn_up", list(range(600_000))),
    "too many lists": put("settings", [[] for _ in range(100_000)]),
    "too long": put("source", "x" * (5 << 20)),
}


@pytest.mark.parametrize("attack", MANIFESTS)
def test_foreign_descriptions_are_refused(attack: str, folder: Path) -> None:
    said = json.loads((folder / MANIFEST).read_bytes())
    MANIFESTS[attack](said)
    (folder / MANIFEST).write_text(json.dumps(said))
    refusal(folder)


@pytest.mark.parametrize("name", [WEIGHTS, METADATA, MANIFEST, "model.onnx"])
def test_missing_files_are_refused(name: str, folder: Path) -> None:
    """A pipe would be waited for, a device never ends."""
    (folder / name).unlink()
    os.mkfifo(folder / name)
    refusal(folder)
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    refusal(folder)
