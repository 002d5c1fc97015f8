"""Every architecture on every engine, against transformers and against each other.

The golden models, one for each formula, are made by golden/make.py. Larger random ones bring the block types.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import CHUNK, GOLDEN, SOME_GPU, bring_back, load_engine
from heads_oracle import HeadOracle
from small_models import Edit, Small, write_small

from edge.backends.base import Engine
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
NATIVE = Row("cpu", "f32", EXACT), Row("cpu", "f16", 8e-2), Row("cpu", "int8", 8e-1)
GPU = Row(f"gpu@{SOME_GPU}", "f32", EXACT)
SLOW = pytest.param(NATIVE[0], marks=pytest.mark.slow)
SELDOM = pytest.param(GPU, marks=pytest.mark.exhaustive)
# Native code that others show, since angles are computed outside of it; each model takes seconds to compile.
OLD_FORMULAS = (
    "arcee", "chatglm", "ernie4_5", "gemma", "gemma3-linear", "glm4", "granite", "llama-linear", "llama-llama3",
    "llama-yarn", "nemotron", "phi3", "qwen2", "qwen2-untied", "qwen2-yarn", "seed_oss", "stablelm", "starcoder2",
)  # fmt: skip
GPU_OFTEN = ("gpt2", "smollm3")  # the cores of test_cores.py have the other formulas
SMALL_ROWS = ("onnx-f16-gemma3", "onnx-int8-gemma3", "llamacpp-f16-qwen2", "cpu-f16-gpt2")


def cases() -> list[Any]:
    """Engines × golden models: float32 rows in `make test`. Each shape compiles anew."""
    return [
        pytest.param(row, name, id=f"{row}-{name}", marks=marks_of(row, name))
        for name in NAMES for row in (REFERENCE, *LLAMACPP, *ONNX, *NATIVE, GPU)
        if not (row in LLAMACPP and name == "llama-window")
    ]  # fmt: skip


def marks_of(row: Row, name: str) -> list[pytest.MarkDecorator]:
    often = GPU_OFTEN if row == GPU else NAMES
    seldom = name not in often or (row.backend == "cpu" and name in OLD_FORMULAS)
    seldom = seldom or (row.kv_dtype != "f32" and f"{row}-{name}" not in SMALL_ROWS)
    return [pytest.mark.slow] * (row.backend == "cpu") + [pytest.mark.exhaustive] * seldom


ENGINES = pytest.mark.parametrize(("row", "name"), cases())


@pytest.fixture(autouse=True)
def native_here(request: pytest.FixtureRequest) -> None:
    """The native engine and ONNX Runtime are tested where they are installed and run."""
    if "row" in request.fixturenames and request.getfixturevalue("row").backend == "cpu":
        require_native()
    if "row" in request.fixturenames and request.getfixturevalue("row").backend == "onnx":
        pytest.importorskip("onnxruntime")


def require_native() -> None:
    pytest.importorskip("tvm_ffi")
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("the native engine runs on x86-64")


@ENGINES
def test_logits_match_transformers(row: Row, name: str, engines: Callable[[Engine], Engine]) -> None:
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
def test_llama_cpp_shifts_no_magnified_keys(name: str, engines: Callable[[Engine], Engine]) -> None:
    """It multiplies the keys of YaRN and LongRoPE once more, and rotates those of SmolLM3's layers without RoPE."""
    engine = engines(load_engine(open_family(name).model, "llamacpp", "f16"))
    engine.forward(open_family(name).tokens[:9])
    with pytest.raises(UnsupportedError, match="cannot shift"):
        engine.kv.keep(np.array([0, 8], np.int32), close_gaps=True)


# LongRoPE: 256 positions before scaling


@pytest.mark.parametrize("row", [REFERENCE, ONNX[0], SLOW], ids=str)
def test_longrope_chooses_factors_by_text(row: Row, engines: Callable[[Engine], Engine]) -> None:
    """Not by the rows of the cache; and again for every text."""
    family, long = open_family("phi3-longrope"), open_family("phi3-longrope").arrays["long_logits"]
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype, capacity=512))
    for count, answer in ((256, family.expected), (257, long), (40, family.expected), (300, long)):
        engine.kv.truncate(0)
        engine.kv.announce(count)
        row.close_to(engine.forward_all(family.tokens)[-len(answer) :], answer, family.name)
    assert np.abs(long - family.expected).max() > 1


@pytest.mark.parametrize("row", [ONNX[0], SLOW, GPU], ids=str)
def test_text_that_outgrows_original_context(row: Row, engines: Callable[[Engine], Engine]) -> None:
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


# Keeping rows of windowed layers and of everything else, again and again


@pytest.mark.parametrize("close_gaps", [True, False], ids=["close", "leave"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[pytest.mark.exhaustive] * (each not in ("llama-window", "phi3-longrope")))
        for each in ("gpt2", "llama-window", "mistral3", "phi3-longrope", "qwen2-yarn", "qwen3", "smollm3")
    ],
)
@pytest.mark.parametrize("row", [SLOW, ONNX[0], SELDOM], ids=str)
def test_engines_stream_as_reference_does(
    row: Row, name: str, close_gaps: bool, engines: Callable[[Engine], Engine]
) -> None:
    model, random = open_family(name).model, np.random.default_rng(5)
    both = [engines(load_engine(model, backend, "f32", capacity=64)) for backend in (row.backend, "reference")]
    for step in (40, 9, 1, 24, 1, 30):
        part = random.integers(3, model.spec.vocab, step).astype(np.int32)
        ours, theirs = (engine.forward_all(part) for engine in both)
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=EXACT)
        kept = random.random(both[0].kv.length) < 0.6
        kept[[0, -1]] = True
        for engine in both:
            engine.kv.keep(np.flatnonzero(kept).astype(np.int32), close_gaps=close_gaps)
        np.testing.assert_array_equal(both[0].kv.positions, both[1].kv.positions)


@pytest.mark.parametrize("close_gaps", [True, False], ids=["close", "leave"])
@pytest.mark.parametrize(
    ("row", "name"),
    [
        pytest.param(NATIVE[0], "gemma2", marks=pytest.mark.slow),
        pytest.param(NATIVE[0], "gemma3", marks=pytest.mark.slow),
        (ONNX[0], "gemma2"), (ONNX[0], "gemma3"),
        *(pytest.param(GPU, each, marks=pytest.mark.exhaustive) for each in ("gemma2", "gemma3")),
    ],
    ids=str,
)  # fmt: skip
def test_windowed_layers_keep_rows_after_evictions(
    row: Row, name: str, close_gaps: bool, engines: Callable[[Engine], Engine]
) -> None:
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


# Block types


WIDE = {"hidden": 256, "heads": 4, "kv_heads": 2, "head": 64, "ffn": 256}  # rows of whole blocks, of any type
FIELDS: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    "gemma3": {"attention__sliding_window_pattern": 2, "rope__freq_base_swa": 5000.0},
    "phi3": {"rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.2},
}
TYPES = {  # two or three for each architecture, and each somewhere: every one takes longer to compile
    "gemma2": {"": "Q4_0", "token_embd": "Q6_K", "ffn_down": "Q6_K"},
    "gemma3": {"": "Q4_K", "token_embd": "Q8_0", "attn_v": "Q6_K"},
    "gpt2": {"": "F16", "attn_qkv": "Q5_1", "ffn_down": "Q5_1"},
    "phi3": {"": "Q4_1", "attn_qkv": "Q3_K", "ffn_up": "Q2_K"},
    "qwen2": {"": "Q5_0", "attn_v": "IQ4_NL", "ffn_down": "Q5_K"},
    "qwen3": {"": "BF16", "attn_q": "IQ4_NL", "ffn_gate": "Q4_K"},
}


def add_factors(weights: dict[str, AnyArray]) -> None:
    """LongRoPE's, for heads of 64."""
    weights["rope_factors_short"] = np.linspace(1, 1.5, 32, dtype=np.float32)
    weights["rope_factors_long"] = np.linspace(1.2, 8, 32, dtype=np.float32)


def quantized_cases() -> list[Any]:
    """Activations of 8 bits in ONNX and beside native rows of float16. tests/native and tests/gpu have each type."""
    engines = [("onnx", "f32", 0.995), ("llamacpp", "f16", 0.999), ("cpu", "f16", 0.999), ("cpu", "f32", None)]
    engines += [(f"gpu@{SOME_GPU}", "f32", None), ("gpu@opencl:0", "f32", None)]
    often = [("onnx", "f32", each) for each in TYPES] + [("llamacpp", "f16", "phi3")]
    return [
        pytest.param(*engine, name, marks=[pytest.mark.exhaustive] * ((*engine[:2], name) not in often))
        for engine in engines for name in TYPES
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "kv_dtype", "least", "architecture"), quantized_cases())
def test_quantized_logits_match_reference(
    backend: str, kv_dtype: str, least: float | None, architecture: str, tmp_path: Path,
    engines: Callable[[Engine], Engine],
) -> None:  # fmt: skip
    """In a chunk and in steps. least: correlation of logits; None: as exact as the reference."""
    window = 20 if architecture.startswith("gemma") else 0
    small = Small(layers=2, window=window, types=TYPES[architecture], architecture=architecture, **WIDE)
    edit: Edit | None = add_factors if architecture == "phi3" else None
    model = open_model(write_small(tmp_path / "model.gguf", small, edit, **FIELDS.get(architecture, {})))
    tokens = np.random.default_rng(7).integers(3, model.spec.vocab, 45).astype(np.int32)
    oracle, ours = (engines(load_engine(model, *each)) for each in (("reference", "f32"), (backend, kv_dtype)))
    oracle.kv.announce(65)  # LongRoPE's factors of long texts, which llama.cpp has in a cache of that size
    expected = oracle.forward_all(tokens)
    for step in (45, 1):
        ours.kv.truncate(0)
        ours.kv.announce(65)
        found = np.concatenate([ours.forward_all(tokens[at : at + step]).copy() for at in range(0, 45, step)])
        if least is None:
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
        else:
            assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > least
