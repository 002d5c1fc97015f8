"""Decoders that embed, such as Qwen3-Embedding: the vectors of transformers and of llama.cpp."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN
from embedders import SKY, write_embedder
from hf_folders import complaint

from edge.converters.huggingface.reader import convert_folder
from edge.converters.huggingface.writer import write_folder
from edge.model.model import open_model
from edge.run.starting.loading import load


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_folder_gives_transformers_vectors(mode: str, tmp_path: Path) -> None:
    convert_folder(write_embedder(tmp_path / "folder", mode), tmp_path / "model.gguf")
    model = open_model(tmp_path / "model.gguf")
    with np.load(GOLDEN / "folders" / "qwen3-embedding.npz") as golden, load(model, backend="reference") as session:
        assert model.encode_text(SKY, embedded=True).tolist() == golden["tokens"].tolist()
        np.testing.assert_allclose(session.embed(SKY), golden[mode], atol=1e-4)
        assert session.embed(SKY * 200, truncate=True).shape == golden[mode].shape
    assert model.tokenizer.end_ids >= {0, 2}
    assert "its own pooling" in complaint(lambda: write_folder(model.file, model.spec, tmp_path / "again"))


def test_llama_cpp_gives_same_vector(tmp_path: Path) -> None:
    llama = pytest.importorskip("llama_cpp")
    convert_folder(write_embedder(tmp_path / "folder"), tmp_path / "model.gguf")
    theirs = llama.Llama(str(tmp_path / "model.gguf"), embedding=True, n_ctx=96, verbose=False)
    try:
        with load(open_model(tmp_path / "model.gguf"), backend="reference") as session:
            np.testing.assert_allclose(session.embed(SKY), theirs.embed(SKY, normalize=True), atol=2e-3)
    finally:
        theirs.close()
