"""Several sequences in one pass: each row of a batch is that of a step of its sequence alone, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, exhaustive, load_engine, open_golden
from lora_files import write_adapter

from edge.backends import engine_named
from edge.backends.base import AdaptedEngine, BatchedEngine, EngineConfig, ObservedEngine, VerifyingEngine
from edge.backends.kv_cache import CapacityError, HeadKVCache
from edge.errors import EngineError, InputError, UnsupportedError
from edge.model.adapters.lora import Lora, open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import make_plan
from edge.types import FloatArray, IntArray

SEQUENCES, STEPS = 8, 8  # also of engines that run fewer, for which code is compiled once
CPU, GPU = engine_named("cpu"), engine_named("gpu")


def load(
    model: Model, kv_dtype: str, sequences: int, *, threads: int = 2, observes: bool = False, backend: str = "cpu"
) -> BatchedEngine:
    engine = load_engine(
        model, backend, kv_dtype, capacity=48, chunk=16, logits_rows=1, observes=observes, threads=threads,
        sequences=sequences,
    )  # fmt: skip
    return cast(BatchedEngine, engine)


def evict(engine: BatchedEngine, number: int) -> None:
    """Keep sinks and the newest rows, as StreamingLLM does."""
    kv = engine.sequence(number).kv
    rows = np.arange(kv.length, dtype=np.int32)
    kv.keep(np.concatenate([rows[:2], rows[-8:]]), close_gaps=True)


class Texts:
    """Random prompts and next tokens, for every sequence; the second sequence evicts rows in the middle."""

    def __init__(self, vocab: int, count: int = SEQUENCES) -> None:
        rng = np.random.default_rng(29)
        sizes = rng.integers(1, 30, count)
        self.prompts: list[IntArray] = [rng.integers(0, vocab, size).astype(np.int32) for size in sizes]
        self.prompts[1] = rng.integers(0, vocab, 30).astype(np.int32)
        self.next: IntArray = rng.integers(0, vocab, (STEPS, count)).astype(np.int32)
        self.orders = [rng.permutation(count).tolist() for _ in range(STEPS)]

    def alone(self, engine: BatchedEngine, number: int) -> list[FloatArray]:
        """The logits of every step of a sequence that runs by itself, as the engine's first."""
        engine.kv.truncate(0)
        engine.forward(self.prompts[number])
        found = []
        for step in range(STEPS):
            if (step, number) == (STEPS // 2, 1):
                evict(engine, 0)
            found.append(np.array(engine.forward(self.next[step, number][None])))
        return found

    def together(self, engine: BatchedEngine) -> list[list[FloatArray]]:
        """The same of all, in batches of 1 to all of them in any order."""
        for number, prompt in enumerate(self.prompts):
            engine.sequence(number).forward(prompt)
        found: list[list[FloatArray]] = [[] for _ in self.prompts]
        for step, order in enumerate(self.orders):
            if step == STEPS // 2:
                evict(engine, 1)
            for part in (order[: step + 1], order[step + 1 :]):
                if part:
                    logits = engine.forward_batch(self.next[step][part], part)
                    for number, row in zip(part, logits, strict=True):
                        found[number].append(np.array(row))
        return found


_ON_GPU = (  # with rings, rows of earlier layers, experts, sinks, learned positions, latent rows, tempered queries
    "gemma3", "gemma4", "gemma4moe", "qwen3moe", "gpt-oss", "gpt2", "minicpm3", "deepseek2", "mistral3",
    "phi3-longrope",
)  # fmt: skip


@pytest.mark.parametrize(("name", "kv_dtype", "threads"), [
    ("llama-gqa-tied", "f16", 2), exhaustive("llama-gqa-tied", "f16", 1),
    *(exhaustive(path.stem, "f16", 2) for path in sorted(GOLDEN.glob("*.gguf")) if path.with_suffix(".npz").exists()),
    *(exhaustive(name, kv_dtype, 2) for name in ("gemma3", "qwen3moe") for kv_dtype in ("int8", "int4", "f32")),
])  # fmt: skip
def test_batch_equals_steps(name: str, kv_dtype: str, threads: int) -> None:
    model = open_model(GOLDEN / f"{name}.gguf")
    texts = Texts(model.spec.vocab)
    with closing(load(model, kv_dtype, SEQUENCES, threads=threads)) as engine:
        found = texts.together(engine)
    with closing(load(model, kv_dtype, 1, threads=threads)) as engine:
        for number, rows in enumerate(found):
            for step, (row, expected) in enumerate(zip(rows, texts.alone(engine, number), strict=True)):
                assert (row == expected).all(), (number, step)


@pytest.mark.parametrize(("name", "kv_dtype", "count", "place"), [
    ("llama-window", "f16", 3, SOME_GPU), *(exhaustive(name, "f16", 3, SOME_GPU) for name in _ON_GPU),
    *(exhaustive("gemma3", kv_dtype, 3, SOME_GPU) for kv_dtype in ("int8", "int4", "f32")),
    exhaustive("llama-gqa-tied", "f16", 10, SOME_GPU), exhaustive("llama-gqa-tied", "f16", 3, "opencl:0"),
])  # fmt: skip
def test_batch_on_gpu_equals_steps(name: str, kv_dtype: str, count: int, place: str) -> None:
    """Of an engine whose steps are those of the reference engine."""
    model = open_model(GOLDEN / f"{name}.gguf")
    texts = Texts(model.spec.vocab, count)
    with closing(load(model, kv_dtype, count, backend=f"gpu@{place}")) as engine:
        found = texts.together(engine)
        for number, rows in enumerate(found):
            for step, (row, expected) in enumerate(zip(rows, texts.alone(engine, number), strict=True)):
                assert (row == expected).all(), (number, step)
    expected = texts.alone(load(model, "f32", 1, backend="reference"), 0)
    close = {"f16": 0.1, "f32": 1e-3}.get(kv_dtype, 5)
    np.testing.assert_allclose(np.stack(found[0]), np.stack(expected), rtol=0, atol=close)


def test_batch_observes_each_sequence_as_it_asks() -> None:
    """Attention and votes, as steps accumulate them, in the same pass; a third sequence observes nothing."""
    model = open_golden("llama-gqa-tied").model
    tokens, asked = np.arange(1, 13, dtype=np.int32), ((1, False), (1, True), (0, False))

    def paid(engine: BatchedEngine, number: int, *, alone: bool) -> FloatArray:
        sequence = cast(ObservedEngine, engine.sequence(number))
        sequence.observe(asked[number][0], votes=asked[number][1])
        sequence.forward(tokens)
        if alone:
            sequence.forward(tokens[number][None])
        return np.zeros(0, np.float32)

    def attention(engine: BatchedEngine) -> list[FloatArray]:
        return [np.array(cast(HeadKVCache, engine.sequence(number).kv).attention) for number in range(3)]

    with closing(load(model, "f16", SEQUENCES, observes=True)) as engine:
        for number in range(3):
            paid(engine, number, alone=True)
        expected = attention(engine)
        for number in range(3):
            engine.sequence(number).kv.truncate(0)
            paid(engine, number, alone=False)
        engine.forward_batch(tokens[:3], range(3))
        found = attention(engine)
    assert all((one == other).all() for one, other in zip(found, expected, strict=True))
    assert found[0].any()
    assert not found[2].any()


def test_sequences_shrink_and_forget_apart() -> None:
    model = open_golden("llama-gqa-tied").model
    texts = Texts(model.spec.vocab)
    with closing(load(model, "f16", SEQUENCES)) as engine:
        for number in range(3):
            engine.sequence(number).forward(texts.prompts[number])
        saved = [engine.sequence(number).kv.save() for number in range(3)]
        engine.sequence(1).kv.shrink(32)
        engine.sequence(0).kv.truncate(0)
        assert engine.sequence(1).kv.save().data == saved[1].data
        assert engine.sequence(2).kv.save().data == saved[2].data
        assert [engine.sequence(number).kv.capacity for number in range(3)] == [48, 32, 48]


def _refused(engine: BatchedEngine, tokens: Sequence[int], sequences: Sequence[int]) -> None:
    with pytest.raises(InputError):
        engine.forward_batch(np.array(tokens, np.int32), sequences)


def test_impossible_batches_are_refused() -> None:
    model = open_golden("llama-gqa-tied").model
    with closing(load(model, "f16", SEQUENCES)) as engine:
        _refused(engine, [1, 2], [0, 0])
        _refused(engine, [1, 2], [0, SEQUENCES])
        _refused(engine, [1], [0, 1])
        _refused(engine, [1, model.spec.vocab], [0, 1])
        with pytest.raises(InputError, match=f"there is no {SEQUENCES}"):
            engine.sequence(SEQUENCES)
        engine.sequence(1).forward(np.ones(48, np.int32))
        with pytest.raises(CapacityError):
            engine.forward_batch(np.array([1, 2], np.int32), [0, 1])
        assert [engine.sequence(number).kv.length for number in range(3)] == [0, 48, 0]
    with pytest.raises(EngineError, match="closed"):
        engine.forward_batch(np.array([1, 2], np.int32), [0, 2])


@pytest.mark.parametrize("name", ["llama-gqa-tied", "qwen35"])
def test_plans_count_the_rows_and_state_of_every_sequence(name: str) -> None:
    spec = open_model(GOLDEN / f"{name}.gguf").spec
    one, four = (make_plan(spec, CPU, Options(max_kv_size=64, sequences=count)) for count in (1, 4))
    assert four.bytes.kv == 4 * one.bytes.kv
    assert four.bytes.fixed_kv == 4 * one.bytes.fixed_kv == 4 * spec.state_bytes
    assert four.bytes.scratch > one.bytes.scratch


@pytest.mark.parametrize(("backend", "name", "options", "of"), [
    ("llamacpp", "llama-gqa-tied", {}, ""), ("gpu", "qwen35", {}, " of models with recurrent layers"),
    ("gpu", "llama-gqa-tied", {"kv_policy": "h2o"}, " under policies that observe attention"),
])  # fmt: skip
def test_sequences_are_refused_where_there_is_one(
    backend: str, name: str, options: dict[str, Any], of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(GPU), "gpu_memory", lambda _: None)  # this machine may have none
    spec = open_model(GOLDEN / f"{name}.gguf").spec
    with pytest.raises(UnsupportedError, match=f"{backend} engine runs one sequence at a time{of}: leave"):
        make_plan(spec, engine_named(backend), Options(sequences=2, **options))


def test_sequences_are_at_most_64() -> None:
    spec = open_golden("llama-gqa-tied").model.spec
    with pytest.raises(InputError, match="sequences must be from 1 to 64"):
        make_plan(spec, CPU, Options(sequences=0))


# Sequences with LoRA adapters of their own

DRAFTS, RANK = 7, 20
RUNS = (0, 1, 2, 1, 0, 2, 1, 1)  # the adapters of each sequence


def adapters_of(model: Model, folder: Path) -> list[Lora | None]:
    """None, and two."""
    files = [write_adapter(folder / f"{rank}.gguf", model, rank, seed=rank) for rank in (3, RANK)]
    return [None, *(open_lora((LoraFile(each),), model.file, model.spec) for each in files)]


def load_adapted(model: Model) -> BatchedEngine:
    config = EngineConfig(48, 16, "f16", 2, sequences=SEQUENCES, lora_rank=RANK, loras=2, drafts=DRAFTS)
    return cast(BatchedEngine, CPU.load(model.file, model.spec, config))


@pytest.mark.parametrize("name", [
    "llama-gqa-tied", *(exhaustive(each) for each in ("qwen35moe", "falcon-h1", "lfm2", "gemma3", "gpt2", "phi3")),
])  # fmt: skip
def test_batch_with_adapters_equals_steps(name: str, tmp_path: Path) -> None:
    model = open_model(GOLDEN / f"{name}.gguf")
    texts, loras, expected = Texts(model.spec.vocab), adapters_of(model, tmp_path), []
    with closing(load_adapted(model)) as engine:
        for number, adapters in enumerate(RUNS):
            cast(AdaptedEngine, engine).set_lora(loras[adapters])
            expected.append(texts.alone(engine, number))
    with closing(load_adapted(model)) as engine:
        for number, prompt in enumerate(texts.prompts):
            cast(AdaptedEngine, engine.sequence(number)).set_lora(loras[RUNS[number]])
            engine.sequence(number).forward(prompt)
        for step in range(STEPS):
            if step == STEPS // 2:
                evict(engine, 1)
            for adapters in (2, 0, 1):
                group = [number for number in range(SEQUENCES) if RUNS[number] == adapters]
                for number, row in zip(group, engine.forward_batch(texts.next[step][group], group), strict=True):
                    assert (row == expected[number][step]).all(), (step, number)


@pytest.mark.parametrize("place", [None, exhaustive(SOME_GPU)])
def test_drafts_have_the_logits_of_steps_with_adapters(place: str | None, tmp_path: Path) -> None:
    model = open_golden("llama-gqa-tied").model
    text, lora = Texts(model.spec.vocab).prompts[1][: 6 + 1 + DRAFTS], adapters_of(model, tmp_path)[2]
    on_gpu: dict[str, Any] = {"capacity": 48, "chunk": 16, "logits_rows": 1, "lora": lora, "drafts": DRAFTS}
    with closing(load_engine(model, f"gpu@{place}", "f16", **on_gpu) if place else load_adapted(model)) as engine:
        cast(AdaptedEngine, engine).set_lora(lora)
        engine.forward(text[:6])
        expected = [np.array(engine.forward(token[None])) for token in text[6:]]
        engine.kv.truncate(6)
        assert (cast(VerifyingEngine, engine).verify(text[6:]) == np.stack(expected)).all()


def test_sequences_change_their_adapters_apart(tmp_path: Path) -> None:
    """Adapters that no sequence runs give way; each that one runs stays."""
    model = open_golden("llama-gqa-tied").model
    text, loras = Texts(model.spec.vocab).prompts[1], adapters_of(model, tmp_path)
    third = open_lora((LoraFile(tmp_path / "3.gguf", 0.5),), model.file, model.spec)
    with closing(load_adapted(model)) as engine:
        sequences = [cast(AdaptedEngine, engine.sequence(number)) for number in range(3)]
        keys = [each.kv.key for each in sequences]
        for sequence, lora in zip(sequences, loras, strict=True):
            sequence.set_lora(lora)
        assert sequences[0].kv.key == keys[0]
        assert len({each.kv.key for each in sequences}) == 3
        with pytest.raises(InputError, match="different adapters"):
            engine.forward_batch(np.array([1, 2], np.int32), [0, 1])
        before = np.array(sequences[1].forward(text))
        with pytest.raises(InputError, match="for 2 adapters at the same time"):
            sequences[0].set_lora(third)
        sequences[2].set_lora(third)
        changed = np.array(sequences[2].forward(text))
        sequences[1].kv.truncate(0)
        assert (sequences[1].forward(text) == before).all()
        assert (changed != before).any()


def test_plans_count_adapters_of_sequences(tmp_path: Path) -> None:
    model = open_golden("llama-gqa-tied").model
    options = Options(max_kv_size=64, lora=(LoraFile(write_adapter(tmp_path / "a.gguf", model, 8)),))
    one, four, two = (
        make_plan(model.spec, CPU, options.updated(sequences=count, loras=loras)).bytes.lora
        for count, loras in ((1, None), (4, None), (4, 2))
    )
    assert (four, two) == (4 * one, 2 * one)
    with pytest.raises(InputError, match="loras must be from 1 to 64"):
        make_plan(model.spec, CPU, options.updated(sequences=4, loras=0))
