"""Latent attention whose `attn_k_b` and `attn_v_b` a file has in one matrix; experts of such models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, all_logits, exhaustive, load_engine, mean_kl
from fallbacks import open_fallback
from lora_files import write_adapter
from test_gguf_file import GGUF

from edge.backends.importance import EXTRA, RowImportance
from edge.converters.gguf.quantize import Settings, quantize_gguf
from edge.errors import UnsupportedError
from edge.model.adapters.lora import open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import open_model
from edge.model.tensors import find_network

MATRIX = "blk.0.attn_kv_b.weight"


def test_blocks_in_one_matrix_are_transposed(tmp_path: Path) -> None:
    """The reference engine reads Q4_0 as it is; the native engine packs the transpose of `attn_k_b` in Q8_0."""
    whole = open_model(GOLDEN / "minicpm3.gguf")
    quantize_gguf(whole.file, whole.spec, tmp_path / "q4.gguf", Settings("Q4_0", "rtn"))
    model, tokens = open_model(tmp_path / "q4.gguf"), open_fallback("minicpm3")[1]
    assert model.file.tensors[MATRIX].type == "Q4_0"
    expected, found = (all_logits(model, tokens, backend, chunk=24) for backend in ("reference", "cpu"))
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.99999


@pytest.mark.parametrize("dtype", [exhaustive("f16"), "int8"])
def test_long_chunks_expand_rows_behind_others(dtype: str) -> None:
    """With BF16, chunks of 64 tokens and more make keys and values of each head, also of rows that were there before;
    shorter ones attend to latent rows."""
    model, tokens, _ = open_fallback("minicpm3")
    text = np.concatenate([tokens, tokens[::-1], tokens[:32]])
    expected = all_logits(model, text, chunk=96, capacity=192)
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


@pytest.mark.parametrize(("dtype", "loss", "step"), [("int8", 0.1, 0.1), exhaustive("int4", 0.5, 1)])
def test_long_rotated_keys_leave_latent_vectors_their_codes(
    dtype: str, loss: float, step: float, tmp_path: Path
) -> None:
    """Rotated keys 30 times as long, and queries as much shorter; with one scale for both parts as they are, the loss
    is 0.54 and 6.4 nats. Policies see keys as they were."""
    file, factor = GGUF.read(GOLDEN / "deepseek2.gguf"), np.float32(30)
    for layer in (0, 1):
        for name, rows, times in (("attn_kv_a_mqa", (1, 48), factor), ("attn_q_b", (2, 48), 1 / factor)):
            shape, kind, data = file.tensors[f"blk.{layer}.{name}.weight"]
            weights = np.frombuffer(data, np.float32).reshape(*rows, -1).copy()
            weights[:, 32:] *= times
            file.tensors[f"blk.{layer}.{name}.weight"] = (shape, kind, weights.tobytes())
    model, tokens = open_model(file.write(tmp_path / "model.gguf")), open_fallback("deepseek2")[1]
    reference, engine = load_engine(model, "reference", "f32", chunk=24), load_engine(model, "cpu", dtype, chunk=24)
    assert mean_kl(reference.forward_all(tokens), engine.forward_all(tokens)) < loss
    network = find_network(model.spec)
    weights = np.random.default_rng(1).standard_normal((2, 1, 48 + EXTRA), np.float32) / 100
    weights[..., 48:50] = 1  # of norms: of keys, and of the values with which they begin
    known, kv = RowImportance(network, dict(enumerate(weights))), reference.kv
    for layer in (0, 1):
        keys, count = engine.kv.keys(layer)[0], tokens.size
        exact, values = kv.keys[layer][0, :count], kv.values[layer][0, :count]
        np.testing.assert_allclose(*(np.linalg.norm(each, axis=-1) for each in (keys, exact)), rtol=step)
        wanted = known.predict(exact, np.arange(count), np.linalg.norm(values, axis=-1), kv.rope.rotation, layer, 0)
        np.testing.assert_allclose(np.log(engine.kv.importance(layer, known)[0]), np.log(wanted), atol=step)


def test_adapters_of_joint_latent_matrix_are_refused(tmp_path: Path) -> None:
    model = open_model(GOLDEN / "minicpm3.gguf")
    path = write_adapter(tmp_path / "lora.gguf", model)
    with pytest.raises(UnsupportedError, match="attn_kv_b, whose heads are packed apart: merge it with edge convert"):
        open_lora([LoraFile(path)], model.file, model.spec)
