"""Encoders from Hugging Face folders (golden/encoders.py): transformers' vectors, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from embedders import SKY, vectors_of_llama_cpp, write_embedder
from hf_folders import complaint, edit_json

from edge.converters.convert import Conversion, convert
from edge.converters.gguf.quantize import Settings
from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.writer import write_folder
from edge.errors import UnsupportedError
from edge.formats.gguf import read_gguf
from edge.model.model import open_model
from edge.run.starting.loading import load

ENCODERS = GOLDEN / "encoders"
POOLING = {"bert": "mean", "bert-cased": "cls"}


@pytest.mark.parametrize("name", POOLING)
def test_folder_gives_transformers_vectors_and_ids(name: str, tmp_path: Path) -> None:
    convert_folder(ENCODERS / name, tmp_path / "model.gguf")
    model = open_model(tmp_path / "model.gguf")
    with np.load(ENCODERS / f"{name}.npz") as golden, load(model, backend="reference") as session:
        np.testing.assert_allclose(session.embed(SKY, normalize=False), golden[POOLING[name]][0], atol=1e-4)
    for case in json.loads((ENCODERS / "tokenizer.json").read_text(encoding="utf-8")):
        if case["text"]:
            assert model.encode_text(case["text"]).tolist() == case[name], repr(case["text"])
    theirs = read_gguf(ENCODERS / f"{name}.gguf")
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.seperator_token_id", "tokenizer.ggml.token_type_count"):
        assert model.file.metadata[key] == theirs.metadata[key]
    assert {each: info.shape for each, info in model.file.tensors.items()} == {
        each: info.shape for each, info in theirs.tensors.items()
    }


def test_folder_becomes_four_bits(tmp_path: Path) -> None:
    settings = Settings(type="Q4_0", method="rtn")
    convert(ENCODERS / "bert", tmp_path / "q.gguf", Conversion("gguf", settings=settings))
    model = open_model(tmp_path / "q.gguf")
    assert model.spec.weight_type == "Q4_0"
    with np.load(ENCODERS / "bert.npz") as golden, load(model, backend="reference") as session:
        expected = golden["mean"][0] / np.linalg.norm(golden["mean"][0])
        assert session.embed(SKY) @ expected > 0.98
    with pytest.raises(UnsupportedError, match="encoders cannot be calibrated yet"):
        convert(
            ENCODERS / "bert", tmp_path / "p.gguf", Conversion("gguf", settings=Settings(method="gptq")),
            tokens=lambda tokenizer: tokenizer.encode(SKY * 100),
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_llama_cpp_gives_the_same_vectors(kind: str, tmp_path: Path) -> None:
    folder = ENCODERS / "bert" if kind == "encoder" else write_embedder(tmp_path / "folder")
    convert_folder(folder, tmp_path / "model.gguf")
    (theirs,) = vectors_of_llama_cpp(tmp_path / "model.gguf", SKY)
    with load(tmp_path / "model.gguf", backend="reference") as session:
        np.testing.assert_allclose(session.embed(SKY), theirs, atol=2e-3)


@pytest.mark.parametrize(("file", "edit", "message"), [
    ("config.json", lambda said: said.update(hidden_act="relu"), "hidden_act is 'relu'"),
    ("config.json", lambda said: said.update(position_embedding_type="relative_key"), "position_embedding_type"),
    ("config.json", lambda said: said.update(is_decoder=True), "is_decoder is true"),
    ("1_Pooling/config.json", lambda said: said.update(pooling_mode_max_tokens=True), "pooling is not supported"),
    ("1_Pooling/config.json", lambda said: (said.clear(), said.update(pooling_mode=[])), "pooling is not supported"),
    ("tokenizer.json", lambda said: said["normalizer"].update(handle_chinese_chars=False), "handle_chinese_chars"),
    ("tokenizer.json", lambda said: said.update(normalizer=None), "normalizer is null: BertNormalizer"),
    ("tokenizer.json", lambda said: said["model"].update(max_input_chars_per_word=5), "max_input_chars_per_word"),
])  # fmt: skip
def test_other_settings_are_refused(
    file: str, edit: Callable[[dict[str, Any]], object], message: str, tmp_path: Path
) -> None:
    shutil.copytree(ENCODERS / "bert", tmp_path / "bert")
    edit_json(tmp_path / "bert" / file, edit)
    said = complaint(lambda: convert_folder(tmp_path / "bert", tmp_path / "model.gguf"))
    assert message in said
    assert file in said
    assert "\n" not in said


def test_modules_behind_encoder(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    shutil.copytree(ENCODERS / "bert", folder)
    shutil.rmtree(folder / "1_Pooling")
    (folder / "modules.json").unlink()
    convert_folder(folder, tmp_path / "plain.gguf")  # a plain BERT: the mean
    spec = open_model(tmp_path / "plain.gguf").spec
    assert spec.network.pooling == "mean"
    for modules, message in (
        ([{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}], "the module .* is not supported"),
        ([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "2_Dense"),
        ([{"type": "sentence_transformers.models.Pooling", "path": "../1_Pooling"}], "not the name of a folder"),
        ([{"type": "sentence_transformers.models.Dense", "path": ".."}], "not the name of a folder"),
        ([{"type": "sentence_transformers.models.Dense", "path": "\0"}], "not the name of a folder"),
        ([{"type": None}], "the module null"),
        ({"type": 1}, "list"),
    ):
        (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
        said = complaint(lambda: convert_folder(folder, tmp_path / "model.gguf"))
        assert re.search(message, said), said


# Decoders that embed, such as Qwen3-Embedding


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_decoder_gives_transformers_vectors(mode: str, tmp_path: Path) -> None:
    convert_folder(write_embedder(tmp_path / "folder", mode), tmp_path / "model.gguf")
    model = open_model(tmp_path / "model.gguf")
    with np.load(GOLDEN / "folders" / "qwen3-embedding.npz") as golden, load(model, backend="reference") as session:
        assert model.encode_text(SKY, embedded=True).tolist() == golden["tokens"].tolist()
        np.testing.assert_allclose(session.embed(SKY), golden[mode], atol=1e-4)
        assert session.embed(SKY * 200, truncate=True).shape == golden[mode].shape
    assert model.tokenizer.end_ids >= {0, 2}
    assert "its own pooling" in complaint(lambda: write_folder(model.file, model.spec, tmp_path / "again"))
