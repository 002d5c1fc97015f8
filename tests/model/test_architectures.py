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
from test_gguf_file import GGUF, STRING

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
    "arcee",
    "chatglm",
    "ernie4_5",
    "gemma",
    "gemma3-linear",
    "glm4",
    "llama-linear",
    "nemotron",
    "qwen2-untied",
    "qwen2-yarn",
    "seed_oss",
    "starcoder2",
)
GPU_OFTEN = ("gemma2", "gpt2", "phi3-longrope", "smollm3")  # the cores of test_cores.py have the other formulas
SMALL_ROWS = ("gemma3", "gpt2", "phi3-longrope", "qwen2")  # different enough
HALVES = ("gemma3", "gpt2")  # float16 of the others: `test_quantized_models_of_every_architecture`


def cases() -> list[Any]:
    """Engines × golden models; every shape is compiled anew, which takes a while."""
    rows = [pytest.param(row, name, id=f"{row}-{name}") for name in NAMES for row in (REFERENCE, *LLAMACPP, *ONNX)]
    rows = [each for each in rows if not (each.values[0] in LLAMACPP and each.values[1] == "llama-window")]
    native = [(row, name) for name in NAMES for row in NATIVE if row.kv_dtype != "int8" or name in SMALL_ROWS]
    rows += [pytest.param(row, name, id=f"{row}-{name}", marks=marks_of(row, name)) for row, name in native]
    on_gpu = {name: [] if name in GPU_OFTEN else [pytest.mark.exhaustive] for name in NAMES}
    return rows + [pytest.param(GPU, name, id=f"{GPU}-{name}", marks=marks) for name, marks in on_gpu.items()]


def marks_of(row: Row, name: str) -> list[pytest.MarkDecorator]:
    """In float32 every architecture is tested; its formulas are the same for smaller rows."""
    usual = {"f32": NAMES, "f16": HALVES, "int8": SMALL_ROWS}[row.kv_dtype]
    seldom = name not in usual or name in OLD_FORMULAS
    return [pytest.mark.slow, *([pytest.mark.exhaustive] if seldom else [])]


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
def test_logits_are_those_of_transformers_however_tokens_come(
    row: Row, name: str, engines: Callable[[Engine], Engine]
) -> None:
    family = open_family(name)
    count, last = family.tokens.size, len(family.expected)
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype, chunk=count, logits_rows=count))
    row.close_to(engine.forward_all(family.tokens)[-last:], family.expected, name)
    for step in (7, 1):
        engine.kv.truncate(0)
        parts = [engine.forward_all(family.tokens[at : at + step]).copy() for at in range(0, count, step)]
        row.close_to(np.concatenate(parts)[-last:], family.expected, name)


@ENGINES
def test_kept_rows_are_seen_at_their_own_positions(row: Row, name: str, engines: Callable[[Engine], Engine]) -> None:
    family = open_family(name)
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype))
    answer = family.arrays["ring_logits" if engine.kv.has_tail else "keep_logits"]
    engine.forward(family.tokens[:PROMPT])
    engine.kv.keep(family.arrays["keep_rows"], close_gaps=False)
    row.close_to(engine.forward_all(family.tokens[PROMPT : PROMPT + len(answer)]), answer, name)


WRONGLY_SHIFTED = ("llama-yarn", "mistral3", "phi3-longrope", "qwen2-yarn", "smollm3")


@pytest.mark.parametrize("name", WRONGLY_SHIFTED)
def test_llama_cpp_is_not_trusted_to_shift_keys_that_are_magnified_or_not_rotated(
    name: str, engines: Callable[[Engine], Engine]
) -> None:
    """It multiplies the keys of YaRN and LongRoPE once more, and rotates those of SmolLM3's layers without RoPE."""
    engine = engines(load_engine(open_family(name).model, "llamacpp", "f16"))
    engine.forward(open_family(name).tokens[:9])
    with pytest.raises(UnsupportedError, match="cannot shift"):
        engine.kv.keep(np.array([0, 8], np.int32), close_gaps=True)


def cases_of_closing() -> list[Any]:
    known = [each for each in cases() if "close_logits" in open_family(each.values[1]).arrays]
    return [each for each in known if not (each.values[0] in LLAMACPP and each.values[1] in WRONGLY_SHIFTED)]


@pytest.mark.parametrize(("row", "name"), cases_of_closing())
def test_kept_rows_move_up(row: Row, name: str, engines: Callable[[Engine], Engine]) -> None:
    family, answer = open_family(name), open_family(name).arrays["close_logits"]
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype))
    engine.forward(family.tokens[:PROMPT])
    engine.kv.keep(family.arrays["keep_rows"], close_gaps=True)
    row.close_to(engine.forward_all(family.tokens[PROMPT : PROMPT + len(answer)]), answer, name)


@pytest.mark.parametrize("row", [REFERENCE, LLAMACPP[0]], ids=str)
def test_minicpm_is_granite_without_a_scale_of_scores(
    row: Row, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    """transformers has no class for it. Here the queries' matrix has the scale instead."""
    granite, family = GGUF.read(GOLDEN / "granite.gguf"), open_family("granite")
    _, scale = granite.metadata.pop("granite.attention.scale")
    minicpm = GGUF({str(key).replace("granite.", "minicpm."): value for key, value in granite.metadata.items()})
    minicpm.metadata["general.architecture"] = (STRING, "minicpm")
    for name, (shape, kind, data) in granite.tensors.items():
        factor = float(scale) * 16**0.5 if "attn_q." in str(name) else 1.0
        minicpm.tensors[name] = (shape, kind, (np.frombuffer(data, np.float32) * np.float32(factor)).tobytes())
    path = tmp_path / "minicpm.gguf"
    path.write_bytes(minicpm.to_bytes())
    engine = engines(load_engine(open_model(path), row.backend, row.kv_dtype, chunk=64, logits_rows=64))
    row.close_to(engine.forward_all(family.tokens)[-len(family.expected) :], family.expected, "minicpm")


# LongRoPE: 256 positions before scaling


@pytest.mark.parametrize("row", [REFERENCE, ONNX[0], SLOW], ids=str)
def test_longrope_chooses_factors_by_the_text(row: Row, engines: Callable[[Engine], Engine]) -> None:
    """Not by the rows of the cache; and again for every text."""
    family, long = open_family("phi3-longrope"), open_family("phi3-longrope").arrays["long_logits"]
    engine = engines(load_engine(family.model, row.backend, row.kv_dtype, capacity=512))
    for count, answer in ((256, family.expected), (257, long), (40, family.expected), (300, long)):
        engine.kv.truncate(0)
        engine.kv.announce(count)
        row.close_to(engine.forward_all(family.tokens)[-len(answer) :], answer, family.name)
    assert np.abs(long - family.expected).max() > 1


def test_llama_cpp_chooses_longropes_factors_by_the_cache(engines: Callable[[Engine], Engine]) -> None:
    family, long = open_family("phi3-longrope"), open_family("phi3-longrope").arrays["long_logits"]
    for capacity, answer in ((256, family.expected), (512, long)):
        engine = engines(load_engine(family.model, "llamacpp", "f32", capacity=capacity))
        LLAMACPP[0].close_to(engine.forward_all(family.tokens)[-len(answer) :], answer, family.name)
        engine.kv.shrink(engine.kv.length)  # which makes a new context
        engine.kv.truncate(0)
        LLAMACPP[0].close_to(engine.forward_all(family.tokens)[-len(answer) :], answer, family.name)


@pytest.mark.parametrize("row", [ONNX[0], SLOW, GPU], ids=str)
def test_a_text_that_outgrows_the_original_context(row: Row, engines: Callable[[Engine], Engine]) -> None:
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
    "name", ["gpt2", "llama-window", "mistral3", "phi3-longrope", "qwen2-yarn", "qwen3", "smollm3"]
)
@pytest.mark.parametrize("row", [SLOW, ONNX[0], SELDOM], ids=str)
def test_engines_stream_as_the_reference_does(
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
        pytest.param(NATIVE[0], "gemma3-linear", marks=pytest.mark.slow),
        (ONNX[0], "gemma2"), (ONNX[0], "gemma3-linear"), (GPU, "gemma2"),
        pytest.param(GPU, "gemma3-linear", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)  # fmt: skip
def test_layers_with_windows_keep_their_rows_whatever_is_evicted(
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


def quantized_model(architecture: str, folder: Path) -> Model:
    window = 20 if architecture.startswith("gemma") else 0
    small = Small(layers=2, window=window, types=TYPES[architecture], architecture=architecture, **WIDE)
    edit: Edit | None = add_factors if architecture == "phi3" else None
    return open_model(write_small(folder / "model.gguf", small, edit, **FIELDS.get(architecture, {})))


@pytest.mark.parametrize("architecture", TYPES)
def test_quantized_models_of_every_architecture_in_onnx(
    architecture: str, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    """Activations are rounded to int8 there."""
    pytest.importorskip("onnxruntime")
    model, tokens = quantized_model(architecture, tmp_path), np.random.default_rng(7).integers(3, 270, 45)
    ours, expected = (engines(load_engine(model, name, "f32")).forward_all(tokens) for name in ("onnx", "reference"))
    assert np.corrcoef(ours.ravel(), expected.ravel())[0, 1] > 0.995


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in ("gemma2", "qwen2"))) for name in TYPES],
)
def test_quantized_models_of_every_architecture(
    architecture: str, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    require_native()
    model = quantized_model(architecture, tmp_path)
    tokens = np.random.default_rng(7).integers(3, model.spec.vocab, 45).astype(np.int32)
    oracle, fast = (engines(load_engine(model, *each)) for each in (("reference", "f32"), ("cpu", "f16")))
    for engine in (oracle, fast):
        engine.kv.announce(65)  # LongRoPE's factors of long texts, which llama.cpp has in a cache of that size
    expected, ours = oracle.forward_all(tokens), fast.forward_all(tokens).copy()
    theirs = engines(load_engine(model, "llamacpp", "f16")).forward_all(tokens)
    for other in (expected, theirs):
        assert np.corrcoef(ours.ravel(), other.ravel())[0, 1] > 0.999
    fast.kv.truncate(0)
    fast.kv.announce(65)
    pieces = np.concatenate([fast.forward_all(tokens[at : at + 1]).copy() for at in range(tokens.size)])
    assert np.corrcoef(pieces.ravel(), ours.ravel())[0, 1] > 0.9999


@pytest.mark.parametrize("place", [SOME_GPU, pytest.param("opencl:0", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(each, marks=() if each == "gemma3" else pytest.mark.exhaustive) for each in TYPES],
)
def test_quantized_models_of_every_architecture_on_gpus(
    architecture: str, place: str, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    """In a chunk and in steps."""
    model = quantized_model(architecture, tmp_path)
    tokens = np.random.default_rng(7).integers(3, model.spec.vocab, 45).astype(np.int32)
    oracle, ours = (engines(load_engine(model, name, "f32")) for name in ("reference", f"gpu@{place}"))
    expected = oracle.forward_all(tokens)
    np.testing.assert_allclose(ours.forward_all(tokens), expected, rtol=0, atol=1e-3)
    ours.kv.truncate(0)
    for token, answer in zip(tokens, expected, strict=True):
        np.testing.assert_allclose(ours.forward(np.array([token])), answer, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    ["gemma3", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in TYPES if each != "gemma3")],
)
def test_quantized_models_of_every_architecture_in_exact_mode(
    architecture: str, tmp_path: Path, engines: Callable[[Engine], Engine]
) -> None:
    require_native()
    model = quantized_model(architecture, tmp_path)
    tokens = np.random.default_rng(7).integers(3, model.spec.vocab, 45).astype(np.int32)
    oracle, exact = (engines(load_engine(model, name, "f32")) for name in ("reference", "cpu"))
    for engine in (oracle, exact):
        engine.kv.announce(65)
    np.testing.assert_allclose(exact.forward_all(tokens), oracle.forward_all(tokens), rtol=0, atol=1e-3)
