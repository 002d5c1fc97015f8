"""Sequences with LoRA adapters of their own: their rows are those of an engine that runs one alone."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, open_golden
from lora_files import write_adapter

from edge.backends import engine_named
from edge.backends.base import AdaptedEngine, BatchedEngine, EngineConfig, VerifyingEngine
from edge.errors import InputError
from edge.model.adapters.lora import Lora, open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import make_plan
from edge.types import FloatArray, IntArray

CPU = engine_named("cpu")
SEQUENCES, STEPS, DRAFTS, RANK = 8, 4, 7, 20
RUNS = (0, 1, 2, 1, 0, 2, 1, 1)  # the adapters of each sequence


class Case:
    """A model, adapters (none at first), and texts of sequences that run them."""

    def __init__(self, model: Model, folder: Path) -> None:
        self.model = model
        files = [write_adapter(folder / f"{rank}.gguf", model, rank, seed=rank) for rank in (3, RANK)]
        self.loras: list[Lora | None] = [
            None,
            *(open_lora((LoraFile(each),), model.file, model.spec) for each in files),
        ]
        rng = np.random.default_rng(29)
        self.prompts: list[IntArray] = [
            rng.integers(0, model.spec.vocab, size).astype(np.int32) for size in rng.integers(2, 30, SEQUENCES)
        ]
        self.next: IntArray = rng.integers(0, model.spec.vocab, (STEPS, SEQUENCES)).astype(np.int32)

    def load(self, kv_dtype: str, threads: int = 2) -> BatchedEngine:
        config = EngineConfig(
            48, 16, kv_dtype, threads, sequences=SEQUENCES, lora_rank=RANK, loras=2, drafts=DRAFTS
        )  # fmt: skip
        return cast(BatchedEngine, CPU.load(self.model.file, self.model.spec, config))

    def check(self, kv_dtype: str, threads: int = 2) -> None:
        with closing(self.load(kv_dtype, threads)) as engine:
            expected = [self._alone(engine, number) for number in range(SEQUENCES)]
        with closing(self.load(kv_dtype, threads)) as engine:
            for number, prompt in enumerate(self.prompts):
                cast(AdaptedEngine, engine.sequence(number)).set_lora(self.loras[RUNS[number]])
                engine.sequence(number).forward(prompt)
            for step in range(STEPS):
                for adapters in (2, 0, 1):
                    group = [number for number in range(SEQUENCES) if RUNS[number] == adapters]
                    for number, row in zip(group, engine.forward_batch(self.next[step][group], group), strict=True):
                        assert (row == expected[number][step]).all(), (step, number)

    def _alone(self, engine: BatchedEngine, number: int) -> list[FloatArray]:
        cast(AdaptedEngine, engine).set_lora(self.loras[RUNS[number]])
        engine.forward(self.prompts[number])
        return [np.array(engine.forward(self.next[step, number][None])) for step in range(STEPS)]


@pytest.mark.parametrize("threads", [exhaustive(1), 2])
def test_batch_with_adapters_equals_steps(threads: int, tmp_path: Path) -> None:
    Case(open_golden("llama-gqa-tied").model, tmp_path).check("f16", threads)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["qwen35moe", "falcon-h1", "lfm2", "gemma3", "gpt2", "phi3"])
def test_batch_with_adapters_equals_steps_in_every_architecture(name: str, tmp_path: Path) -> None:
    Case(open_model(GOLDEN / f"{name}.gguf"), tmp_path).check("f16")


def test_drafts_have_the_logits_of_steps_with_adapters(tmp_path: Path) -> None:
    case = Case(open_golden("llama-gqa-tied").model, tmp_path)
    text = np.concatenate(case.prompts)[: 6 + 1 + DRAFTS]
    with closing(case.load("f16")) as engine:
        cast(AdaptedEngine, engine).set_lora(case.loras[2])
        engine.forward(text[:6])
        expected = [np.array(engine.forward(token[None])) for token in text[6:]]
        engine.kv.truncate(6)
        assert (cast(VerifyingEngine, engine).verify(text[6:]) == np.stack(expected)).all()


def test_sequences_change_their_adapters_apart(tmp_path: Path) -> None:
    """Adapters that no sequence runs give way; each that one runs stays."""
    case = Case(open_golden("llama-gqa-tied").model, tmp_path)
    third = open_lora((LoraFile(tmp_path / "3.gguf", 0.5),), case.model.file, case.model.spec)
    with closing(case.load("f16")) as engine:
        sequences = [cast(AdaptedEngine, engine.sequence(number)) for number in range(3)]
        keys = [each.kv.key for each in sequences]
        for sequence, lora in zip(sequences, case.loras, strict=True):
            sequence.set_lora(lora)
        assert sequences[0].kv.key == keys[0]
        assert len({each.kv.key for each in sequences}) == 3
        with pytest.raises(InputError, match="different adapters"):
            engine.forward_batch(np.array([1, 2], np.int32), [0, 1])
        before = np.array(sequences[1].forward(case.prompts[0]))
        with pytest.raises(InputError, match="for 2 adapters at the same time"):
            sequences[0].set_lora(third)
        sequences[2].set_lora(third)
        changed = np.array(sequences[2].forward(case.prompts[0]))
        sequences[1].kv.truncate(0)
        assert (sequences[1].forward(case.prompts[0]) == before).all()
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
