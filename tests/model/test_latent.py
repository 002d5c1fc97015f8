"""Latent attention whose `attn_k_b` and `attn_v_b` a file has in one matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, load_engine
from fallbacks import open_fallback
from lora_files import write_adapter
from test_gguf_file import GGUF

from edge.converters.quantize import Settings, quantize_gguf
from edge.errors import ModelFormatError, UnsupportedError
from edge.model.adapters.lora import open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import open_model

MATRIX = "blk.0.attn_kv_b.weight"


def test_blocks_in_one_matrix_are_transposed(tmp_path: Path) -> None:
    """The reference engine reads Q4_0 as it is; the native engine packs the transpose of `attn_k_b` in Q8_0."""
    pytest.importorskip("tvm_ffi")
    whole = open_model(GOLDEN / "minicpm3.gguf")
    quantize_gguf(whole.file, whole.spec, tmp_path / "q4.gguf", Settings("Q4_0", "rtn"))
    model, tokens = open_model(tmp_path / "q4.gguf"), open_fallback("minicpm3")[1]
    assert model.file.tensors[MATRIX].type == "Q4_0"
    expected, found = (
        load_engine(model, backend, "f32", chunk=24).forward_all(tokens) for backend in ("reference", "cpu")
    )
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99999


@pytest.mark.parametrize("dtype", [exhaustive("f16"), "int8"])
def test_long_chunks_expand_rows_behind_others(dtype: str) -> None:
    """With BF16, chunks of 64 tokens and more make keys and values of each head, also of rows that were there before;
    shorter ones attend to latent rows."""
    pytest.importorskip("tvm_ffi")
    model, tokens, _ = open_fallback("minicpm3")
    text = np.concatenate([tokens, tokens[::-1], tokens[:32]])
    expected = load_engine(model, "reference", "f32", chunk=96, capacity=192).forward_all(text)
    engine = load_engine(model, "cpu", dtype, chunk=96, capacity=192, logits_rows=96)
    for pieces in ([70, 90], [20] * 8):
        engine.kv.truncate(0)
        ends = np.cumsum(pieces)
        found = [engine.forward_all(text[end - size : end]) for size, end in zip(pieces, ends, strict=True)]
        assert np.corrcoef(np.concatenate(found).ravel(), expected.ravel())[0, 1] > (
            0.9999 if dtype == "int8" else 0.999998
        )
    engine.close()


@pytest.mark.parametrize(
    ("dtype", "name", "other", "alike"), [("f32", "deepseek2", "cpu", 1e-7), ("int8", "minicpm3", "reference", 1e-3)]
)
def test_evicted_rows_of_onnx_share_values_with_keys(dtype: str, name: str, other: str, alike: float) -> None:
    """Rows are kept once, so keys that are rotated again are the values, too, whose part must not change."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("tvm_ffi")
    model, tokens, _ = open_fallback(name)
    found = []
    for backend, rows in ((other, "f32"), ("onnx", dtype)):
        engine = cast(Any, load_engine(model, backend, rows, chunk=24, observes=other == "cpu"))
        if other == "cpu":
            engine.observe(4)
        engine.forward_all(tokens)
        paid = engine.kv.attention if other == "cpu" else np.arange(2)
        engine.kv.keep(np.r_[:4, 40 : len(tokens)].astype(np.int32), close_gaps=True)
        found.append((engine.forward_all(tokens[:9]), paid))
        engine.close()
    for expected, own in zip(*found, strict=True):
        assert np.corrcoef(own.ravel(), expected.ravel())[0, 1] > 1 - alike


def test_matrix_of_another_shape_is_refused(tmp_path: Path) -> None:
    file = GGUF.read(GOLDEN / "minicpm3.gguf")
    _, kind, data = file.tensors[MATRIX]
    file.tensors[MATRIX] = ((32, 64), kind, data[: 4 * 32 * 64])
    model = open_model(file.write(tmp_path / "model.gguf"))
    with pytest.raises(ModelFormatError, match=r"attn_kv_b.weight has shape \(32, 64\) instead of \(32, 96\)"):
        load_engine(model, "reference", "f32")


def test_adapters_of_the_matrix_are_to_be_merged(tmp_path: Path) -> None:
    model = open_model(GOLDEN / "minicpm3.gguf")
    path = write_adapter(tmp_path / "lora.gguf", model)
    with pytest.raises(UnsupportedError, match="attn_kv_b, whose heads are packed apart: merge it with edge convert"):
        open_lora([LoraFile(path)], model.file, model.spec)
