"""Every architecture on every engine, against transformers: golden models, one for each formula, by golden/make.py."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from conftest import CHUNK, GOLDEN, SOME_GPU, Engines, bring_back, exhaustive, load_engine
from golden_models import require_native  # noqa: F401
from heads_oracle import HeadOracle

from edge.errors import UnsupportedError
from edge.model.model import Model, open_model
from edge.types import AnyArray, FloatArray, IntArray

NAMES = (
    "arcee", "chatglm", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3", "gemma3-linear", "glm4", "gpt2",
    "granite", "llama-linear", "llama-llama3", "llama-window", "llama-yarn", "mistral3", "nemotron", "phi3",
    "phi3-longrope", "qwen2", "qwen2-untied", "qwen2-yarn", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
PROMPT = 40  # tokens before rows are evicted, see golden/make.py
EXACT = 2e-4  # transformers' logits are rounded to 1.2e-4
# llama.cpp looks gelu up in a table of float16.
GELU = 6e-3


@dataclass(frozen=True)
class Family:
    """A golden model and the arrays of `family_answers` in golden/make.py."""

    name: str
    model: Model
    arrays: dict[str, AnyArray]

    @property
    def tokens(self) -> IntArray:
        return self.arrays["tokens"]

    @property
    def expected(self) -> FloatArray:
        """Logits after the last tokens."""
        return self.arrays["logits"]


@lru_cache
def open_family(name: str) -> Family:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return Family(name, open_model(GOLDEN / f"{name}.gguf"), dict(arrays))


@dataclass(frozen=True)
class Row:
    """An engine in one of its settings. tolerance: largest error of a logit; their standard deviation is 3."""

    backend: str
    kv_dtype: str
    tolerance: float

    def __str__(self) -> str:
        return f"{self.backend}-{self.kv_dtype}"

    def close_to(self, ours: FloatArray, expected: FloatArray, name: str) -> None:
        gelu = self.backend == "llamacpp" and name.startswith(("gemma", "gpt2", "starcoder2"))
        np.testing.assert_allclose(ours, expected, rtol=0, atol=max(self.tolerance, GELU if gelu else 0))


REFERENCE = Row("reference", "f32", EXACT)
LLAMACPP = Row("llamacpp", "f32", EXACT), Row("llamacpp", "f16", 8e-2)
ONNX = Row("onnx", "f32", 1e-4), Row("onnx", "f16", 8e-2), Row("onnx", "int8", 1.2)
NATIVE = Row("cpu", "f32", EXACT)
GPU = Row(f"gpu@{SOME_GPU}", "f32", EXACT)
SLOW = pytest.param(NATIVE, marks=pytest.mark.slow)
# Native code that others show, since angles are computed outside of it; each model takes seconds to compile.
OLD_FORMULAS = (
    "arcee", "chatglm", "ernie4_5", "gemma", "gemma3-linear", "glm4", "granite", "llama-linear", "llama-llama3",
    "llama-yarn", "nemotron", "phi3", "qwen2", "qwen2-untied", "qwen2-yarn", "seed_oss", "stablelm", "starcoder2",
)  # fmt: skip
# Graphs that others show: of other angles, or of llama's or qwen2's formulas.
OLD_GRAPHS = (
    "arcee", "chatglm", "ernie4_5", "gemma3-linear", "llama-linear", "llama-llama3", "llama-yarn", "qwen2-untied",
    "qwen2-yarn", "seed_oss",
)  # fmt: skip
GPU_OFTEN = ("gpt2", "smollm3")  # the cores of test_cores.py have the other formulas
SMALL_ROWS = ("onnx-f16-gemma3", "onnx-int8-gemma3", "llamacpp-f16-qwen2")


def cases() -> list[Any]:
    """Engines × golden models: float32 rows in `make test`. Each shape compiles anew."""
    return [
        pytest.param(row, name, id=f"{row}-{name}", marks=marks_of(row, name))
        for name in NAMES for row in (REFERENCE, *LLAMACPP, *ONNX, NATIVE, GPU)
        if (row.kv_dtype == "f32" or f"{row}-{name}" in SMALL_ROWS) and not (row in LLAMACPP and name == "llama-window")
    ]  # fmt: skip


def marks_of(row: Row, name: str) -> list[pytest.MarkDecorator]:
    seldom = name in {"cpu": OLD_FORMULAS, "onnx": OLD_GRAPHS}.get(row.backend, ())
    seldom = seldom or (row == GPU and name not in GPU_OFTEN)
    return [pytest.mark.slow] * (row.backend == "cpu") + [pytest.mark.exhaustive] * seldom


ENGINES = pytest.mark.parametrize(("row", "name"), cases())


@ENGINES
def test_logits_match_transformers(row: Row, name: str, engines: Engines) -> None:
    """Whole, in pieces, and behind an eviction that leaves gaps or closes them."""
    family = open_family(name)
    count, last = family.tokens.size, len(family.expected)
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype, chunk=count, logits_rows=count))
    for step in (count, 7, 1):
        engine.kv.truncate(0)
        parts = [engine.forward_all(family.tokens[at : at + step]).copy() for at in range(0, count, step)]
        row.close_to(np.concatenate(parts)[-last:], family.expected, name)
    for close_gaps, key in ((False, "ring_logits" if engine.kv.has_tail else "keep_logits"), (True, "close_logits")):
        if close_gaps and (key not in family.arrays or (row in LLAMACPP and name in WRONGLY_SHIFTED)):
            continue
        engine.kv.truncate(0)
        engine.forward(family.tokens[:PROMPT])
        engine.kv.keep(family.arrays["keep_rows"], close_gaps=close_gaps)
        answer = family.arrays[key]
        row.close_to(engine.forward_all(family.tokens[PROMPT : PROMPT + len(answer)]), answer, name)


WRONGLY_SHIFTED = ("llama-yarn", "mistral3", "phi3-longrope", "qwen2-yarn", "smollm3")


@pytest.mark.parametrize("name", WRONGLY_SHIFTED)
def test_llama_cpp_shifts_no_magnified_keys(name: str, engines: Engines) -> None:
    """It multiplies the keys of YaRN and LongRoPE once more, and rotates those of SmolLM3's layers without RoPE."""
    engine = engines(load_engine(open_family(name).model, "llamacpp", "f16"))
    engine.forward(open_family(name).tokens[:9])
    with pytest.raises(UnsupportedError, match="cannot shift"):
        engine.kv.keep(np.array([0, 8], np.int32), close_gaps=True)


# LongRoPE: 256 positions before scaling


@pytest.mark.parametrize("row", [REFERENCE, ONNX[0], SLOW], ids=str)
def test_longrope_chooses_factors_by_text(row: Row, engines: Engines) -> None:
    """Not by the rows of the cache; and again for every text."""
    family, long = open_family("phi3-longrope"), open_family("phi3-longrope").arrays["long_logits"]
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype, capacity=512))
    for count, answer in ((256, family.expected), (257, long), (40, family.expected), (300, long)):
        engine.kv.truncate(0)
        engine.kv.announce(count)
        row.close_to(engine.forward_all(family.tokens)[-len(answer) :], answer, family.name)
    assert np.abs(long - family.expected).max() > 1


@pytest.mark.parametrize("row", [ONNX[0], SLOW, exhaustive(GPU)], ids=str)
def test_text_that_outgrows_original_context(row: Row, engines: Engines) -> None:
    """Its keys are rotated anew, on every engine alike, and saved rows keep the factors that they have."""
    model = open_family("phi3-longrope").model
    tokens = np.random.default_rng(3).integers(3, model.spec.vocab, 300).astype(np.int32)
    ours, oracle = (engines(load_engine(model, name, "f32", capacity=512)) for name in (row.backend, "reference"))
    for engine in (ours, oracle):
        engine.forward(tokens[:20])
        engine.kv.keep(np.r_[0:4, 8:20].astype(np.int32), close_gaps=True)  # so that keys are turned otherwise
        engine.forward(tokens[20:250])
    short = ours.kv.key
    after = [np.array(engine.forward_all(tokens[250:270])) for engine in (ours, oracle)]
    np.testing.assert_allclose(*after, rtol=0, atol=EXACT)
    assert short != ours.kv.key

    whole = engines(load_engine(model, "reference", "f32", capacity=512))
    whole.kv.announce(300)
    whole.forward(tokens[:4])
    assert whole.kv.key not in (oracle.kv.key, engines(load_engine(model, "reference", "f32")).kv.key)
    np.testing.assert_allclose(oracle.kv.keys[0][:, :4], whole.kv.keys[0][:, :4], rtol=0, atol=1e-5)  # type: ignore[attr-defined]

    states = [engine.kv.save() for engine in (ours, oracle)]
    for engine, state in zip((ours, oracle), states, strict=True):
        bring_back(engine.kv, state)
        assert engine.kv.key == state.key
    again = [np.array(engine.forward_all(tokens[270:275])) for engine in (ours, oracle)]
    np.testing.assert_allclose(*again, rtol=0, atol=EXACT)
    ours.kv.truncate(0)
    assert ours.kv.key == short


@pytest.mark.parametrize("close_gaps", [True, False], ids=["close", "leave"])
@pytest.mark.parametrize(
    ("row", "name"),
    [
        *(pytest.param(NATIVE, each, marks=pytest.mark.slow) for each in ("gemma2", "gemma3", "llama-window")),
        (ONNX[0], "gemma2"), (ONNX[0], "gemma3"),
        exhaustive(GPU, "gemma3"),
    ],
    ids=str,
)  # fmt: skip
def test_windowed_layers_keep_rows_after_evictions(row: Row, name: str, close_gaps: bool, engines: Engines) -> None:
    """Through a cache of 64 rows, which a text of 400 tokens fills again and again."""
    model, random = open_family(name).model, np.random.default_rng(5)
    engine, oracle = engines(load_engine(model, row.backend, "f32", capacity=64)), HeadOracle(model, 512, CHUNK)
    for step in (40, 9, 1, 24, 1, *[25] * 13):
        part = random.integers(3, model.spec.vocab, step).astype(np.int32)
        np.testing.assert_allclose(engine.forward_all(part), oracle.forward_all(part), rtol=0, atol=EXACT)
        kept = random.random(engine.kv.length) < 0.4
        kept[[0, -1]] = True
        engine.kv.keep(rows := np.flatnonzero(kept).astype(np.int32), close_gaps=close_gaps)
        oracle.keep_heads([rows] * len(oracle.kept))
        if close_gaps:
            oracle.renumber()
        np.testing.assert_array_equal(engine.kv.positions, oracle.rows_of(oracle.positions)[0, 0])
