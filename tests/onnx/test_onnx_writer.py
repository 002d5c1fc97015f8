"""Models written in ONNX: they mean what the GGUF file means, and nothing half-written is left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from conftest import Engines, all_logits, exhaustive, load_engine, open_golden
from small_models import Small, random_quants, random_weights, write_small
from test_architectures import open_family

from edge.backends import find_backend
from edge.backends.rope import find_rotation
from edge.converters.onnx.tokenizer_file import tokenizer_json
from edge.converters.onnx.writer import planned_files, write_onnx
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.model.model import Model, open_model
from edge.run.starting.loading import load
from edge.types import AnyArray

onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")


def convert(model: Model, folder: Path, **options: Any) -> dict[str, int]:
    return write_onnx(model.file, model.spec, folder, **options)


# What is written


def test_folder_passes_the_checker_and_runs_in_onnx_runtime(tmp_path: Path) -> None:
    """Without anything of ours: rows go in and come back as ordinary arrays."""
    golden = open_golden("llama-gqa-untied")
    spec, count, capacity = golden.model.spec, golden.tokens.size, 80
    convert(golden.model, tmp_path / "model")
    for path in (tmp_path / "model").glob("*.onnx"):
        onnx.checker.check_model(str(path))
    session = onnxruntime.InferenceSession(str(tmp_path / "model/model.onnx"))
    rotation = find_rotation(golden.model.file, spec.network, halves=True, head=spec.head_dim)
    cos, sin = rotation.tables(0, np.arange(capacity))
    feeds = {
        "tokens": golden.tokens[None].astype(np.int64), "positions": np.arange(count)[None], "wanted": np.arange(count),
        "last": np.array([count - 1], np.int32), "rows": np.array(count, np.int32), "cos": cos, "sin": sin,
        "given": np.zeros((1, 0, spec.hidden), np.float32), "given_at": np.zeros((0, 2), np.int64),
    }  # fmt: skip
    for layer in range(spec.layers):
        for name in ("past_key", "past_value"):
            feeds[f"{name}.{layer}"] = np.zeros((1, spec.kv_heads, capacity, spec.head_dim), np.float32)
    (logits,) = session.run(["logits"], feeds)
    np.testing.assert_allclose(logits[0], golden.logits, rtol=0, atol=1e-3)


def test_folder_runs_as_its_source(tmp_path: Path, engines: Engines) -> None:
    source = open_family("llama-llama3").model
    sizes = convert(source, tmp_path / "model")
    assert sizes == {path.name: path.stat().st_size for path in (tmp_path / "model").iterdir()}
    assert set(planned_files(source.file, source.spec)) == set(sizes)
    opened = open_model(tmp_path / "model")
    assert opened.spec == source.spec
    text = "Hello, world! 123 <|im_end|>"
    np.testing.assert_array_equal(opened.encode_prompt(text), source.encode_prompt(text))
    tokens, answers = np.arange(40, dtype=np.int32), []
    for model in (source, opened):
        engine = engines(load_engine(model, "onnx", "f32"))
        answers.append(engine.forward_all(tokens))
    np.testing.assert_array_equal(*answers)
    with load(tmp_path / "model", max_kv_size=64, kv_dtype="int8") as session:
        assert session.plan.backend == "onnx"
        session.generate("Hello", max_tokens=5)
    for backend in ("cpu", "llamacpp", "reference"):
        with pytest.raises(UnsupportedError, match="use --backend onnx"):
            find_backend(backend, opened.file, opened.spec)
    with pytest.raises(InputError, match="already"):
        convert(opened, tmp_path / "again")


def test_unsupported_head_sizes_are_refused(tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "small.gguf", Small(head=20)))
    with pytest.raises(UnsupportedError, match="heads of a multiple of 8 values, not 20"):
        find_backend("onnx", model.file, model.spec)


# Weights


def quants_of(kind: str, rows: int, columns: int, seed: int = 3) -> AnyArray:
    """Random weights, uint8 [rows, row bytes]. Those of Q4_K blocks lie around 0, as quantizers make them."""
    raw = random_quants(kind, rows, columns, 0.1, seed)
    if kind == "Q4_K":
        supers, random = raw.reshape(-1, 144), np.random.default_rng(seed)
        scale = random.uniform(0.8, 1.2, len(supers)) * 0.1 / 50 / 4
        supers[:, :4] = np.stack([scale, 7.5 * scale], axis=1).astype(np.float16).view(np.uint8)
        both = random.integers(40, 64, (len(supers), 1)).astype(np.uint8)  # 6 bits of every scale and minimum
        supers[:, 4:12], supers[:, 12:16] = both | ((both >> 4) << 6), (both & 15) | ((both & 15) << 4)
    return raw


@pytest.mark.parametrize(
    ("kind", "tied"),
    [
        *((kind, True) for kind in ("Q5_0", "Q8_0", "F16", "mixed")), ("mixed", False),
        *(exhaustive(kind, True) for kind in ("Q4_0", "Q4_1", "Q4_K", "Q6_K")),  # parts of the mixture
    ],
)  # fmt: skip
def test_block_types(kind: str, tied: bool, tmp_path: Path) -> None:
    """Against the oracle with the same weights in float32; activations are rounded to int8."""
    mixture = {"": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q6_K", "ffn_up": "Q4_K", "token_embd": "Q6_K", "output": "Q5_1"}
    types = mixture if kind == "mixed" else kind
    small = Small(layers=2, hidden=256, heads=4, kv_heads=2, head=64, ffn=512, tied=tied, types=types)
    shapes = {name: each.shape for name, each in random_weights(small).items() if each.ndim == 2}
    chosen = [name for name in shapes if small.type_of(name) == "Q4_K"]
    raw = {name: quants_of("Q4_K", *shapes[name], len(name)) for name in chosen}
    model = open_model(write_small(tmp_path / "small.gguf", small, raw=raw))
    tokens = np.random.default_rng(1).integers(3, 270, 40).astype(np.int32)
    ours, exact = (all_logits(model, tokens, name) for name in ("onnx", "reference"))
    if kind == "F16":
        np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-3)
    assert np.corrcoef(ours.ravel(), exact.ravel())[0, 1] > 0.995


def test_rows_that_are_no_whole_blocks_stay_floats(tmp_path: Path) -> None:
    model = open_model(write_small(tmp_path / "small.gguf", Small(hidden=80, heads=5, kv_heads=1, types="F16")))
    tokens = np.arange(20, dtype=np.int32)
    ours, exact = (all_logits(model, tokens, name) for name in ("onnx", "reference"))
    np.testing.assert_allclose(ours, exact, rtol=0, atol=1e-3)


# tokenizer.json


@pytest.mark.parametrize("source", ["smollm2-135m", "tests/golden/spm.gguf"])
def test_tokenizer_json_gives_our_ids(source: str) -> None:
    model = open_model(source if source.startswith("smol") else Path(__file__).parents[1] / "golden/spm.gguf")
    theirs = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_json(model.tokenizer)))
    assert theirs.get_vocab_size() == model.tokenizer.size
    for text in (
        "Hello world", "The  quick\n\n\tbrown fox 12345, naïve café — 日本語 🎉", "def f(x):\n    return x+1\n",
        "  leading spaces", "user\nHi", "don't I'LL 3.14159 …",
    ):  # fmt: skip
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ids == model.tokenizer.encode(text, special=True).tolist()
        assert theirs.decode(ids, skip_special_tokens=False).strip() == text.strip()


# Bad input, and what is left of it


def test_weights_that_are_no_numbers_leave_nothing(tmp_path: Path) -> None:
    def spoil(weights: dict[str, AnyArray]) -> None:
        weights["blk.0.ffn_down"][3, 5] = np.nan

    model = open_model(write_small(tmp_path / "small.gguf", Small(), spoil))
    with pytest.raises(ModelFormatError, match=r"ffn_down.weight contains values that are no numbers"):
        convert(model, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["small.gguf"]
