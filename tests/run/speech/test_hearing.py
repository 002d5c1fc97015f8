"""Whisper's networks on our engines against transformers, and its readers against each other."""

from __future__ import annotations

import hashlib
import mmap
import shutil
import struct
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from golden_models import GOLDEN, engine_here
from test_cli import edge_here as edge

from edge.backends import engine_named
from edge.errors import EdgeError
from edge.formats.gguf import GGUFFile, read_gguf
from edge.formats.safetensors import read_header
from edge.formats.whisper_bin import FIGURES, read_whisper_bin
from edge.model.names.catalog import PACKAGED, PackagedModel, find_model
from edge.model.whisper import read_whisper
from edge.model.whisper.checkpoint import parts_of_bin, read_checkpoint
from edge.model.whisper.writing import write_whisper
from edge.run.senses.hearing import Listener

ENGINES = [
    "reference", "cpu", "gpu",
    pytest.param("onnx", marks=pytest.mark.skipif(not find_spec("onnxruntime"), reason="onnxruntime is not installed")),
]  # fmt: skip
FOLDER = GOLDEN / "folders" / "whisper"


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER.with_suffix(".npz")))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> GGUFFile:
    path = tmp_path_factory.mktemp("whisper") / "tiny.gguf"
    write_whisper(read_checkpoint(FOLDER), path)
    return read_gguf(path)


@pytest.mark.parametrize("name", ENGINES)
def test_states_and_logits_are_those_of_transformers(name: str, file: GGUFFile, golden: dict[str, np.ndarray]) -> None:
    with engine_here(name), Listener(file, engine_named(name), threads=2, kv_dtype="f32") as listener:
        for _ in range(2):  # the second window replaces the first
            assert np.abs(listener.states(golden["mel"]) - golden["states"]).max() < 1e-4
            listener.encode(golden["mel"])
            if name == "cpu" and sys.platform == "linux":  # scratch of the encoder is returned, but for parts of pages
                assert np.count_nonzero(listener._ears.passes.floats) * 4 < 2 * mmap.PAGESIZE
            some = listener.forward_all(golden["tokens"][:7]).copy()
            rest = np.stack([listener.forward(golden["tokens"][at : at + 1]).copy() for at in range(7, 12)])
            assert np.abs(np.concatenate([some, rest]) - golden["logits"]).max() < 1e-3
        listener.kv.truncate(7)
        again = listener.forward(golden["tokens"][7:8])
        assert np.abs(again - golden["logits"][7]).max() < 1e-3
        paid = listener.align(golden["tokens"])
        assert np.abs(paid - golden["paid"][(0, 1), (1, 0)]).max() < 1e-5
        assert listener.kv.length == 8


@pytest.mark.parametrize("name", ENGINES)
def test_short_window_drops_earlier_rows(name: str, file: GGUFFile, golden: dict[str, np.ndarray]) -> None:
    with engine_here(name), Listener(file, engine_named(name), threads=2, kv_dtype="f32") as listener:
        short, tokens = golden["mel"][:, :21], golden["tokens"][:4]
        listener.encode(short)
        alone = listener.forward(tokens).copy()
        listener.encode(golden["mel"])
        whole = listener.forward(tokens).copy()
        listener.encode(np.concatenate([short, short[:, -1:]], axis=1))
        assert np.abs(listener.forward(tokens) - alone).max() < 1e-5
        assert np.abs(whole - alone).max() > 1e-2
        assert listener.align(tokens).shape == (2, 4, 11)


def test_ctranslate2_file_gives_same_gguf(file: GGUFFile, tmp_path: Path) -> None:
    folder = tmp_path / "ct2"
    folder.mkdir()
    shutil.copyfile(FOLDER.with_suffix(".bin"), folder / "model.bin")
    shutil.copyfile(FOLDER / "tokenizer.json", folder / "tokenizer.json")
    made = tmp_path / "ct2.gguf"
    assert edge("convert", str(folder), str(made)).returncode == 0
    other = read_gguf(made)
    assert {name: (info.shape, info.type) for name, info in other.tensors.items()} == {
        name: (info.shape, info.type) for name, info in file.tensors.items()
    }
    for name, info in file.tensors.items():
        assert (file.tensor_bytes(info) == other.tensor_bytes(other.tensors[name])).all(), name
    one, two = read_whisper(file), read_whisper(other)
    stated = {"alignment": two.alignment, "multilingual": False, "languages": {}}  # CTranslate2's file says less
    assert two == replace(one, spec=two.spec, ears=two.ears, **stated)
    assert one.alignment == ((0, 1), (1, 0))
    assert one.languages == {"en": one.sot + 1, "de": one.sot + 2}


def test_whisper_quantizes_and_is_inspected(file: GGUFFile, tmp_path: Path) -> None:
    made = tmp_path / "small.gguf"
    assert edge("convert", str(file.path), str(made), "--type", "q4_0").returncode == 0
    assert edge("convert", str(FOLDER), str(tmp_path / "direct.gguf"), "--type", "q4_0").returncode == 0
    one, other = read_gguf(made), read_gguf(tmp_path / "direct.gguf")
    assert all((one.tensor_bytes(i) == other.tensor_bytes(other.tensors[n])).all() for n, i in one.tensors.items())
    pruned = edge("convert", str(FOLDER), str(tmp_path / "no.gguf"), "--prune-layers", "1", "--calibration", __file__)
    assert (pruned.returncode, "leave out pruning" in pruned.stderr) == (2, True)
    types = {name: info.type for name, info in read_gguf(made).tensors.items()}
    assert types["blk.1.cross_attn_v.weight"] == types["enc.blk.0.ffn_up.weight"] == "Q4_0"
    assert types["enc.conv1.weight"] == types["position_embd.weight"] == "F16"
    shown = edge("inspect", str(made)).stdout
    assert "1 that hear, 2 that write, of width 32" in shown
    assert " int8 " in shown
    assert "int4" not in shown  # a transcript refuses such rows
    refused = edge("run", str(made), "-p", "hi")
    assert refused.returncode == 2
    assert "edge transcribe" in refused.stderr


def test_whisper_cpp_file_has_same_tensors(file: GGUFFile, tmp_path: Path) -> None:
    """The file of `whisper.cpp/models/convert-h5-to-ggml.py`, whose layout this writes anew."""
    path = tmp_path / "ggml.bin"
    path.write_bytes(_whisper_cpp(read_header(FOLDER / "model.safetensors")))
    with pytest.raises(EdgeError, match="tokens of text"):
        read_checkpoint(path)  # a vocabulary of 272 tokens, and no control tokens
    found = {f"{part.name}.{part.kind}": part.read() for part in parts_of_bin(path, read_whisper_bin(path))}
    wanted = {f"{part.name}.{part.kind}": part.read() for part in read_checkpoint(FOLDER).parts}
    assert found.keys() == wanted.keys()
    assert all(np.array_equal(np.asarray(found[name], np.float32), wanted[name]) for name in wanted)


def _whisper_cpp(tensors: dict) -> bytes:
    names = {"self_attn_layer_norm": "attn_ln",
             "encoder_attn_layer_norm": "cross_attn_ln", "final_layer_norm": "mlp_ln",
             "self_attn.q_proj": "attn.query", "self_attn.k_proj": "attn.key", "self_attn.v_proj": "attn.value",
             "self_attn.out_proj": "attn.out", "encoder_attn.q_proj": "cross_attn.query",
             "encoder_attn.k_proj": "cross_attn.key", "encoder_attn.v_proj": "cross_attn.value",
             "encoder_attn.out_proj": "cross_attn.out", "fc1": "mlp.0", "fc2": "mlp.2", "layers": "blocks",
             "embed_tokens": "token_embedding", "embed_positions.weight": "positional_embedding",
             "encoder.layer_norm": "encoder.ln_post", "decoder.layer_norm": "decoder.ln", "model.": ""}  # fmt: skip
    figures = dict(zip(FIGURES, (312, 32, 32, 2, 1, 24, 32, 2, 2, 16, 1), strict=True))
    out = [b"lmgg", struct.pack("<11i", *figures.values()), struct.pack("<2i", 0, 0), struct.pack("<i", 0)]
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        array = tensor.read()
        if array.ndim == 1:
            array = array.astype(np.float32)
        if name.startswith("encoder.conv") and name.endswith("bias"):
            array = array[:, None]
        code = 0 if array.dtype == np.float32 else 1
        out.append(struct.pack(f"<3i{array.ndim}i", array.ndim, len(name), code, *reversed(array.shape)))
        out += [name.encode(), array.tobytes()]
    return b"".join(out)


def test_packaged_model_becomes_gguf_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "ears_of_tests"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copyfile(FOLDER / "tokenizer.json", package / "tokenizer.json")
    whole = FOLDER.with_suffix(".bin").read_bytes()
    files = []
    for name, part in (("one", whole[:50_000]), ("two", whole[50_000:])):
        (package / name).write_bytes(part)
        files.append((package.name, name))
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    packaged = PackagedModel(tuple(files), "demo-whisper", hashlib.sha256(whole).hexdigest(), hears=True)
    monkeypatch.setitem(PACKAGED, "whisper-test", packaged)
    file = read_gguf(find_model("whisper-test"))
    assert (read_whisper(file).spec.name, read_whisper(file).spec.weight_type) == ("whisper-test", "Q8_0")
    assert find_model("whisper-test").stat().st_ino == file.path.stat().st_ino
    monkeypatch.setitem(PACKAGED, "whisper-test", replace(packaged, sha256="0" * 64))
    with pytest.raises(EdgeError, match="damaged"):
        find_model("whisper-test")
