"""Drafts that are verified together: logits and rows are those of single steps, to the last bit."""

from __future__ import annotations

import copy
import time
from contextlib import closing
from typing import cast

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, exhaustive, load_engine, on_gpu, open_golden

import edge
from edge.backends import engine_named
from edge.backends.base import BatchedEngine, EngineConfig, VerifyingEngine
from edge.backends.kv_cache import CapacityError, RewindError
from edge.devices.power import app_meter
from edge.errors import InputError, UnsupportedError
from edge.grammar.grammar import Grammar
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import DRAFT_TEXT_BYTES, make_plan
from edge.run.drafting import power
from edge.run.sequences.sequence import TokenSequence
from edge.sampling import SamplingParams
from edge.types import IntArray

CPU = engine_named("cpu")
DRAFTS = 7


def load(
    model: Model, kv_dtype: str = "f16", threads: int = 2, backend: str = "cpu", drafts: int = DRAFTS
) -> VerifyingEngine:
    engine = load_engine(
        model, backend, kv_dtype, capacity=96, chunk=16, logits_rows=1, threads=threads, drafts=drafts
    )  # fmt: skip
    return cast(VerifyingEngine, engine)


def check(model: Model, kv_dtype: str = "f16", threads: int = 2, backend: str = "cpu", drafts: int = DRAFTS) -> None:
    """Drafts of any length behind any number of rows; wrong ones are forgotten without a trace."""
    rng = np.random.default_rng(7)
    text = rng.integers(0, model.spec.vocab, 70).astype(np.int32)
    with closing(load(model, kv_dtype, threads, backend, drafts)) as engine:
        engine.forward(text[:20])
        expected = np.stack([np.array(engine.forward(token[None])) for token in text[20:]])
        engine.kv.truncate(0)
        engine.forward(text[:20])
        at = 20
        while at < text.size:
            right, wrong = (int(rng.integers(low, drafts + 1)) for low in (1, 0))
            right = min(right, text.size - at)
            wrong = min(wrong, 1 + drafts - right)
            tokens = np.concatenate([text[at : at + right], rng.integers(0, model.spec.vocab, wrong)]).astype(np.int32)
            wanted = expected[at - 20 :][:right]
            if at % 2:
                found = engine.verify(tokens)[:right]
                ran = len(found)
                assert (found == wanted[:ran]).all(), at
            else:
                tops = engine.verify_top(tokens, 3)[:right]
                ran = len(tops)
                for (ids, logits), row in zip(tops, wanted, strict=False):
                    assert (ids == np.argsort(-row, kind="stable")[:3]).all(), at
                    assert (logits == row[ids]).all(), at
            at += ran
            engine.kv.truncate(at)


_RUN = sorted(
    path.stem for path in GOLDEN.glob("*.gguf")
    if path.with_suffix(".npz").exists() and CPU.most_drafts(open_model(path).spec, {})
)  # fmt: skip


@pytest.mark.parametrize(("name", "kv_dtype", "threads"), [
    ("llama-gqa-tied", "f16", 1), ("llama-gqa-tied", "f16", 2), *(exhaustive(name, "f16", 2) for name in _RUN),
    *(exhaustive("gemma3", kv_dtype, 2) for kv_dtype in ("int8", "int4", "f32")), exhaustive("mamba", "int4", 2),
])  # fmt: skip
def test_drafts_have_the_logits_of_steps(name: str, kv_dtype: str, threads: int) -> None:
    check(open_model(GOLDEN / f"{name}.gguf"), kv_dtype, threads)


@pytest.mark.parametrize(("name", "kv_dtype", "drafts", "place"), [
    ("llama-window", "f16", 2, SOME_GPU), exhaustive("llama-gqa-tied", "f16", DRAFTS, SOME_GPU),
    *(exhaustive(name, "f16", 2, SOME_GPU) for name in ("gemma3", "gemma4", "gpt2", "deepseek2", "qwen3moe")),
    exhaustive("gemma3", "int4", 2, SOME_GPU), exhaustive("llama-gqa-tied", "int8", 2, "opencl:0"),
])  # fmt: skip
def test_drafts_on_gpu_have_the_logits_of_steps(name: str, kv_dtype: str, drafts: int, place: str) -> None:
    check(open_model(GOLDEN / f"{name}.gguf"), kv_dtype, 1, f"gpu@{place}", drafts)


@pytest.mark.parametrize("sequences", [1, 2])
def test_plans_count_the_text_that_drafts_are_copied_from(sequences: int) -> None:
    model = open_model(GOLDEN / "llama-gqa-tied.gguf")
    drafts, none = (
        make_plan(model.spec, CPU, Options(max_kv_size=96, threads=1, sequences=sequences, speculate=speculate))
        for speculate in ("auto", "off")
    )
    assert CPU.most_drafts(model.spec, {"gemm_tokens": 3}) == 2  # as many as a tuned tile has, behind the next token
    room = [CPU.footprint(model.spec, each.config).scratch for each in (drafts, none)]
    assert drafts.bytes.scratch - none.bytes.scratch == sequences * DRAFT_TEXT_BYTES + room[0] - room[1]


@pytest.mark.parametrize(
    "name", ["qwen35", *(exhaustive(each) for each in ("lfm2", "nemotron_h", "jamba", "falcon-mamba", "kimi-linear"))]
)
def test_recurrent_states_forget_wrong_drafts(name: str) -> None:
    """A snapshot between has the tokens that stayed."""
    model = open_model(GOLDEN / f"{name}.gguf")
    check(model)
    text, wrong = np.arange(40, 60, dtype=np.int32), np.arange(9, 13, dtype=np.int32)
    with closing(load(model)) as engine:
        for token in text:
            engine.forward(token[None])
        expected = engine.kv.save()
        engine.kv.truncate(0)
        for token in text[:16]:
            engine.forward(token[None])
        engine.verify(np.concatenate([text[16:], wrong]))
        engine.kv.truncate(text.size)
        found = engine.kv.save()
        assert (found.data, found.tail) == (expected.data, expected.tail)
        with pytest.raises(RewindError):
            engine.kv.truncate(text.size - 1)
        engine.verify(wrong)
        engine.kv.truncate(text.size)
        found = engine.kv.save()
        assert (found.data, found.tail) == (expected.data, expected.tail)


def test_sequences_verify_drafts_of_their_own() -> None:
    """In turns, so that what is kept of the drafts of one is replaced by those of the other."""
    model = open_model(GOLDEN / "qwen35.gguf")
    rng = np.random.default_rng(3)
    texts = rng.integers(0, model.spec.vocab, (2, 40)).astype(np.int32)
    config = EngineConfig(96, 16, "f16", 2, sequences=5, drafts=DRAFTS)  # as in tests/run/test_branches.py
    with closing(cast(BatchedEngine, CPU.load(model.file, model.spec, config))) as engine:
        sequences = [cast(VerifyingEngine, engine.sequence(number)) for number in range(2)]
        expected = []
        for each, text in zip(sequences, texts, strict=True):
            expected.append([np.array(each.forward(token[None])) for token in text])
            each.kv.truncate(0)
        for at in range(0, 40, 4):
            for number, each in enumerate(sequences):
                wrong = rng.integers(0, model.spec.vocab, 3).astype(np.int32)
                found = each.verify(np.concatenate([texts[number, at : at + 4], wrong]))[:4]
                assert (found == expected[number][at : at + 4]).all()
                each.kv.truncate(at + 4)


def test_drafts_are_limited_by_free_rows() -> None:
    with closing(load(open_golden("llama-gqa-tied").model)) as engine:
        with pytest.raises(UnsupportedError, match="7 drafts at once, not 8"):
            engine.verify(np.ones(9, np.int32))
        with pytest.raises(InputError):
            engine.verify(np.array([1, 1 << 20], np.int32))
        engine.forward(np.ones(90, np.int32))
        with pytest.raises(CapacityError):
            engine.verify(np.ones(8, np.int32))
        assert engine.kv.length == 90


def _answers(name: str, speculate: str, backend: str = "cpu", **options: object) -> tuple[str, edge.RunReport]:
    """By a sensor that counts the same watts for all passes."""
    meter = app_meter(lambda: 10 * time.perf_counter())
    keywords = {"max_kv_size": 200, "speculate": speculate, "backend": backend, "meter": meter}
    with edge.load(GOLDEN / f"{name}.gguf", **keywords) as session:  # type: ignore[arg-type]
        prompt = np.tile(np.arange(5, 45, dtype=np.int32), 2)
        text = session.generate(prompt, max_tokens=260, ignore_eos=True, **options)
        assert session.report is not None
        return text, session.report


COLD, WARM = SamplingParams(temperature=0.3, seed=5, repeat_penalty=1.05), SamplingParams(temperature=1, seed=1)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen35"])
@pytest.mark.parametrize("sampling", [SamplingParams(), COLD, WARM])
def test_answer_is_the_same_with_drafts_and_without(
    name: str, sampling: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evictions included: the cache is too small for prompt and answer."""
    monkeypatch.setattr(power, "ENOUGH", 1)
    text, report = _answers(name, "auto", sampling=sampling)
    plain, without = _answers(name, "off", sampling=sampling)
    assert text == plain
    assert report.kv == without.kv
    assert without.drafted is None
    assert report.drafted is not None
    if sampling.temperature == 0:  # a small random model ends in a loop
        assert 0 < report.drafted.accepted <= report.drafted.tokens
        assert report.drafted.by == "seconds and joules"


@pytest.mark.exhaustive
@pytest.mark.parametrize("sampling", [SamplingParams(), WARM])
def test_answer_on_gpu_is_the_same_with_drafts_and_without(sampling: SamplingParams) -> None:
    """Drafts are there if asked for. Greedy ones take turns with tokens that the device chooses."""
    with on_gpu(SOME_GPU):
        text, report = _answers("llama-gqa-tied", "on", sampling=sampling, backend="gpu")
        plain, without = _answers("llama-gqa-tied", "auto", sampling=sampling, backend="gpu")
    assert text == plain
    assert report.kv == without.kv
    assert without.drafted is None
    assert report.drafted is not None
    if sampling.temperature == 0:
        assert 0 < report.drafted.accepted <= report.drafted.tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_run_together_and_equal_steps(temperature: float) -> None:
    """Also behind drafted tokens, and together with others."""
    pytest.importorskip("llguidance")
    grammar = Grammar(regex=r"(The answer, in a word, is [a-c]\.){6}")
    sampling, found = SamplingParams(temperature=temperature, seed=3), dict[str, object]()
    for speculate in ("auto", "off"):
        with edge.load(GOLDEN / "llama-one-layer.gguf", backend="cpu", max_kv_size=400, speculate=speculate) as session:
            prompt, engine, sizes = np.arange(70, 90, dtype=np.int32), session.engine, list[int]()
            for name in ("forward", "verify"):
                run = getattr(engine, name)
                setattr(engine, name, lambda tokens, run=run, sizes=sizes: sizes.append(tokens.size) or run(tokens))
            text = session.generate(prompt, max_tokens=200, grammar=grammar, sampling=sampling)
            assert session.report is not None
            assert session.report.tokens.forced > 100
            assert max(sizes[1:]) == 1 + engine.config.drafts  # which are 0 where they are off
            assert (len(sizes) < session.report.tokens.generated / 3) == (speculate == "auto")
            found[speculate] = text, engine.kv.save().data
    assert found["auto"] == found["off"]


def test_drafts_never_come_from_forgotten_or_foreign_text() -> None:
    tokens = np.arange(5, 45, dtype=np.int32)
    with edge.load(GOLDEN / "llama-gqa-tied.gguf", max_kv_size=200, backend="cpu") as session:
        session.generate(tokens, max_tokens=4, ignore_eos=True)
        assert _copied(session._sequence, tokens)
        session.reset()
        assert not _copied(session._sequence, tokens)
        with session.batch() as batch:
            sequence = batch._slots.all[0].tokens
            batch.generate(tokens, max_tokens=4, ignore_eos=True, tenant="one")
            batch.generate(tokens[:1], max_tokens=1, ignore_eos=True, tenant="one")
            assert _copied(sequence, tokens)
            batch.generate(tokens[:1], max_tokens=1, ignore_eos=True, tenant="two")
            assert not _copied(sequence, tokens)


def _copied(sequence: TokenSequence, text: IntArray) -> bool:
    """Whether a draft behind the beginning of a text would be its continuation."""
    drafts = copy.deepcopy(sequence.ahead.drafts)
    drafts.add(text[:10])
    return drafts.draft(5).tolist() == text[10:15].tolist()
