"""Keys with long biases, as Qwen2.5 has them: what rows lose, also those that are rotated again; those of bundles."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, load_engine, mean_kl
from test_gguf_file import GGUF
from test_prefix_runs import write_prefix

from edge.backends.tvm.kv.householder import reflect
from edge.backends.tvm.kv.row_formats import FORMATS, decode, unpack_keys
from edge.model.model import Model, open_model
from edge.model.parts.given import interleaved
from edge.options import Options
from edge.types import FloatArray

NORM = 300.0  # the rest of a key has 2
LOSS = {"f16": 0.002, "int8": 0.02}  # nats; with biases in the rows 0.08 and 0.7


def biased_model(folder: Path, golden: str = "qwen2", kv_heads: int = 2) -> Model:
    """The biases are in the pair that RoPE rotates least, where trained models have them."""
    file = GGUF.read(GOLDEN / f"{golden}.gguf")
    for layer, angle in ((0, 0.3), (1, 2.0)):
        name = f"blk.{layer}.attn_k.bias"
        shape, kind, data = file.tensors[name]
        biases = np.frombuffer(data, np.float32).reshape(kv_heads, 2, -1).copy()
        biases[:, :, -1] += NORM * np.array([np.cos(angle), np.sin(angle)])
        file.tensors[name] = (shape, kind, biases.tobytes())
    return open_model(file.write(folder / "model.gguf"))


@pytest.mark.parametrize("dtype", LOSS)
def test_rows_of_keys_with_long_biases(dtype: str, tmp_path: Path) -> None:
    model = biased_model(tmp_path)
    with np.load(GOLDEN / "qwen2.npz") as arrays:
        tokens = arrays["tokens"]
    found: list[FloatArray] = []
    for backend, rows in (("reference", "f32"), ("cpu", dtype)):
        engine = cast(Any, load_engine(model, backend, rows, chunk=24))
        before = engine.forward_all(tokens[:40]).copy()
        engine.kv.keep(np.r_[:4, 16:40].astype(np.int32), close_gaps=True)
        found.append(np.concatenate([before, engine.forward_all(tokens[40:])]))
        if backend == "cpu":
            longest = np.abs(engine.kv.store.keys(np.arange(4))).max(axis=(1, 2))  # of rows that were rotated
            assert (np.abs(longest / NORM - 0.95) < 0.1).all()
        engine.close()
    assert mean_kl(*found) < LOSS[dtype]


def test_rows_lack_biases_that_yarn_lengthens(tmp_path: Path) -> None:
    """Keys are 1.14 times as long. There is one KV head, and half a tile of biases."""
    engine = cast(Any, load_engine(biased_model(tmp_path, "qwen2-yarn", 1), "cpu", "f16", chunk=24))
    engine.forward_all(np.arange(40, dtype=np.int32))
    store = engine.kv.store
    stored = store.rows.gather("keys", store.regions.rows(np.arange(40)))
    engine.close()
    assert np.abs(stored).max() < NORM / 8


@pytest.mark.parametrize("dtype", [*LOSS, exhaustive("int4")])
def test_prefixes_of_bundles_have_whole_keys(dtype: str, tmp_path: Path) -> None:
    """The C runtime's keys have their biases: they are the reference's, as the bundle's dtype stores them."""
    pytest.importorskip("tvm_ffi")
    from edge.apps.bundle import Section, make_sections, prepare
    from edge.devices.profiles import HOST, find_profile

    model, count = biased_model(tmp_path), 16
    table = np.random.default_rng(1).standard_normal((count, model.spec.hidden)).astype(np.float32)
    path = write_prefix(tmp_path / "p", tensors={"prompt_embeddings": ("F32", table)}, num_virtual_tokens=count)
    options = Options().updated(
        prefix=path, kv_dtype=dtype, kv_policy="full", max_kv_size=64, prefill_step_size=24, threads=1
    )
    sections = make_sections(prepare(model, find_profile(HOST), options))
    opened = options.prefix_file.open(model.spec)
    engine = cast(Any, load_engine(model, "reference", "f32", chunk=24))
    engine.forward(opened.ids, opened.given)
    expected = interleaved(np.concatenate([each[:, :count] for each in engine.kv.keys]), 8)
    engine.close()
    form, heads, padded = FORMATS[dtype], len(expected), 16
    stored = np.frombuffer(sections[Section.PREFIX], np.uint8).reshape(heads, count, -1)
    key = padded * np.dtype(form.memory).itemsize // form.packed
    scales = stored[..., 2 * key :][..., : form.scales * np.dtype(form.scale).itemsize].copy().view(form.scale)
    found = decode(dtype, unpack_keys(dtype, stored[..., :key].copy().view(form.memory)), scales)
    if form.transformed:
        found = reflect(found, np.frombuffer(sections[Section.NORMALS], np.float32).reshape(heads, padded))
    assert np.abs(expected).max() > NORM / 2
    np.testing.assert_allclose(found[..., :8], expected, atol=NORM / 100)
