"""Several generations at once: their answers are those of a session, whoever runs beside them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, SOME_GPU, FakeMeter, exhaustive, find_adapters, open_golden
from lora_files import write_adapter

from edge.backends.base import BatchedEngine
from edge.errors import BudgetError, BusyError, InputError
from edge.model.model import Model, open_model
from edge.prompt_cache.cache import PromptCache
from edge.run.batching.batch import Batch
from edge.run.batching.slots import Ticket
from edge.run.hooks import Hooks
from edge.run.report import RunReport
from edge.run.request import INTERACTIVE, TITLES, Request
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.sampling import SamplingParams
from edge.types import IntArray

SEQUENCES, ROWS = 5, 128  # of five to eight, code is compiled once (test_batches.py)


@pytest.fixture(scope="module")
def model() -> Model:
    return open_golden("llama-gqa-tied").model


@pytest.fixture(scope="module")
def session(model: Model) -> Iterator[Session]:
    with load(model, sequences=SEQUENCES, max_kv_size=ROWS, threads=2) as session:
        yield session


@pytest.fixture
def batch(session: Session) -> Iterator[Batch]:
    with session.batch() as batch:
        yield batch


def tokens(count: int, seed: int = 0) -> IntArray:
    return np.random.default_rng([29, seed]).integers(3, 250, count).astype(np.int32)


@dataclass
class Answer:
    """A generation, started in a batch."""

    batch: Batch
    pieces: list[str] = field(default_factory=list)
    ends: list[RunReport | Exception] = field(default_factory=list)
    ticket: Ticket | None = None

    def start(self, prompt: Any, max_tokens: int | None = 20, **options: Any) -> Answer:
        lora = options.pop("lora", None)
        request = Request(prompt, max_tokens, ignore_eos=True, **options)
        self.ticket = self.batch.start(request, Hooks(piece=self.pieces.append, end=self.ends.append), lora=lora)
        return self

    @property
    def report(self) -> RunReport:
        (end,) = self.ends
        assert isinstance(end, RunReport), end
        assert end.text == "".join(self.pieces)
        return end

    def cancel(self) -> None:
        self.batch.cancel(self.ticket)


def run(batch: Batch) -> None:
    while batch.step():
        pass


def run_until(batch: Batch, ready: Callable[[], bool]) -> None:
    while not ready():
        assert batch.step()


@pytest.mark.parametrize(("backend", "policy"), [("cpu", "streaming"), ("cpu", "h2o"), exhaustive("gpu", "streaming")])
def test_answers_match_session(model: Model, backend: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy and sampled ones, of prompts with and without evictions, more than there are sequences."""
    if backend == "gpu" and SOME_GPU not in find_adapters():
        pytest.skip(f"no adapter {SOME_GPU}")
    monkeypatch.setenv("EDGE_GPU", SOME_GPU)
    options: dict[str, Any] = {"max_kv_size": 48, "threads": 2, "kv_policy": policy, "backend": backend}
    asked = [
        (tokens(count, count), 20 + count % 7, SamplingParams(temperature=0.9 * (count % 2), seed=count))
        for count in (5, 40, 17, 64, 2, 21, 90)
    ]
    expected = []
    with load(model, **options) as alone:
        for prompt, most, sampling in asked:
            alone.generate(prompt, max_tokens=most, sampling=sampling, ignore_eos=True)
            expected.append(alone.report)
    with load(model, sequences=SEQUENCES, **options) as session, session.batch() as batch:
        answers = [Answer(batch).start(prompt, most, sampling=sampling) for prompt, most, sampling in asked]
        run(batch)
    for answer, other in zip(answers, expected, strict=True):
        assert answer.report.text == other.text
        assert answer.report.tokens == other.tokens
        assert answer.report.kv.evicted == other.kv.evicted
        assert answer.report.stop_reason == other.stop_reason == "length"


def test_adapters_of_generations_match_one_alone(model: Model, tmp_path: Path) -> None:
    """More generations than sequences, some preempted; those that name no adapter have the session's. Rows are shared
    among generations with the same adapter only."""
    small, large = (write_adapter(tmp_path / f"{rank}.gguf", model, rank, seed=rank) for rank in (2, 8))
    chosen: list[Any] = [None, (), f"{small}", f"{small}:0.5", large]
    asked = [(tokens(20 + number % 4, number // 10), chosen[number % 5]) for number in range(20)]
    options: dict[str, Any] = {"max_kv_size": 48, "threads": 2, "lora": str(large)}
    expected = []
    with load(model, **options) as alone:
        for prompt, lora in asked:
            alone.set_lora(large if lora is None else lora)
            expected.append(alone.generate(prompt, max_tokens=12, ignore_eos=True))
    assert len(set(expected)) > 10
    with load(model, sequences=SEQUENCES, **options) as session:
        with session.batch() as batch:
            answers = [
                Answer(batch).start(prompt, 12, lora=lora, priority=number % 3)
                for number, (prompt, lora) in enumerate(asked)
            ]
            run(batch)
            assert [each.report.text for each in answers] == expected
            names = [[each.name for each in answer.report.lora] for answer in answers[:5]]
            assert names == [["8"], [], ["2"], ["2"], ["8"]]

            def reused(lora: Any) -> int:
                answer = Answer(batch).start(tokens(30, 9), 2, lora=lora)
                run(batch)
                return answer.report.tokens.reused

            assert [reused(lora) for lora in (small, large, (), small, None)] == [0, 0, 0, 29, 29]
            with pytest.raises(InputError, match="rank 20"):
                Answer(batch).start(tokens(3), lora=write_adapter(tmp_path / "20.gguf", model, 20))
        session.generate(asked[0][0], max_tokens=12, ignore_eos=True)
        assert session.report.text == expected[0]


def test_callbacks_cancel_or_fail_alone(batch: Batch) -> None:
    ends: list[RunReport | Exception] = []
    failed: list[RunReport | Exception] = []
    pieces: list[str] = []

    def on_piece(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            batch.cancel(ticket)

    def fail(_piece: str) -> None:
        raise ZeroDivisionError

    other = Answer(batch).start(tokens(8, 1))
    ticket = batch.start(Request(tokens(8), None, ignore_eos=True), Hooks(piece=on_piece, end=ends.append))
    batch.start(Request(tokens(8)), Hooks(piece=fail, end=failed.append))
    run(batch)
    assert ends[0].stop_reason == "interrupted"
    assert isinstance(failed[0], ZeroDivisionError)
    assert other.report.stop_reason == "length"


def test_higher_classes_take_sequences_of_lower_ones(batch: Batch) -> None:
    """A preempted generation goes on where it was, as though nothing had happened."""
    alone = Answer(batch).start(tokens(12), 40)
    run(batch)
    titles = [Answer(batch).start(tokens(12, each), 40, priority=TITLES, tenant=each) for each in range(SEQUENCES)]
    run_until(batch, lambda: all(each.pieces for each in titles))
    urgent = Answer(batch).start(tokens(7), 10, priority=INTERACTIVE)
    run_until(batch, lambda: bool(urgent.ends))
    assert not any(each.ends for each in titles)
    preempted = [each for each in titles if each.ticket is not None and each.ticket.preempted]
    assert len(preempted) == 1
    run(batch)
    assert {each.report.tokens.generated for each in titles} == {40}
    assert titles[0].report.text == alone.report.text
    Answer(batch).start(tokens(12, 9), 40, tenant="again")
    again = Answer(batch).start(tokens(12, titles.index(preempted[0])), 40, tenant="again")
    run(batch)
    assert again.report.text == preempted[0].report.text


def test_common_beginning_runs_once(model: Model) -> None:
    """Of prompts that arrive together, one runs the common rows; the others copy them and run the rest."""
    system, own = tokens(300, 1), [tokens(10 + each, 2 + each) for each in range(8)]
    options: dict[str, Any] = {"max_kv_size": 400, "threads": 2}
    with load(model, **options) as alone:
        expected = [alone.generate(np.concatenate([system, each]), max_tokens=5, ignore_eos=True) for each in own]
    with load(model, sequences=8, **options) as session, session.batch() as batch:
        planned = session.plan.bytes.kv
        answers = [
            Answer(batch).start(np.concatenate([system, each]), 5, priority=number % 3)
            for number, each in enumerate(own)
        ]
        run(batch)
        counts = [each.report.tokens for each in answers]
        assert [each.report.text for each in answers] == expected
        assert sum(each.ran for each in counts) == system.size + sum(each.size for each in own)
        assert sorted(each.reused for each in counts) == [0] + 7 * [system.size]
        held = [cast(BatchedEngine, session.engine).sequence(number).kv for number in range(8)]
        assert sum(each.nbytes for each in held) == planned
        assert all(each.length >= system.size for each in held)
        choices = [Answer(batch).start(tokens(50), 5, sampling=SamplingParams(seed=each)) for each in range(4)]
        run(batch)
        assert [each.report.tokens.ran for each in choices] == [50, 1, 1, 1]


def test_hybrid_beginning_runs_once_up_to_state() -> None:
    """A state cannot be copied from the middle of a prompt: the one that runs it stops there until others have it."""
    model = open_model(GOLDEN / "falcon-h1.gguf")
    prompts = [np.concatenate([tokens(150, 1), tokens(5, 2 + each)]) for each in range(4)]
    options: dict[str, Any] = {"max_kv_size": 200, "threads": 2}
    with load(model, **options) as alone:
        expected = []
        for prompt in prompts:
            alone.reset()
            expected.append(alone.generate(prompt, max_tokens=5, ignore_eos=True))
    with load(model, sequences=SEQUENCES, **options) as session, session.batch() as batch:
        answers = [Answer(batch).start(each, 5) for each in prompts]
        run(batch)
        assert [each.report.text for each in answers] == expected
        assert sorted(each.report.tokens.reused for each in answers) == [0, 150, 150, 150]


def test_prompt_cache_serves_all_sequences(model: Model, tmp_path: Path) -> None:
    cache = PromptCache(tmp_path)
    options: dict[str, Any] = {"max_kv_size": ROWS, "threads": 2, "prompt_cache": cache}
    with load(model, **options) as session:
        session.generate(tokens(80), max_tokens=12, ignore_eos=True)
        expected = session.report.text
    with load(model, sequences=SEQUENCES, **options) as session, session.batch() as batch:
        answers = [Answer(batch).start(tokens(80), 12, tenant=each) for each in range(3)]
        run(batch)
    assert [each.report.tokens.reused for each in answers] == [79] * 3
    assert {each.report.text for each in answers} == {expected}


@pytest.mark.parametrize(("kind", "limit"), [("time", 0.3), ("energy", 4.0)])
def test_limit_ends_one_generation_and_not_others(model: Model, kind: str, limit: float) -> None:
    options: dict[str, Any] = {"sequences": SEQUENCES, "max_kv_size": ROWS, "threads": 2}
    with load(model, meter=FakeMeter(per_reading=1.0), **options) as session, session.batch() as batch:
        few, other = Answer(batch).start(tokens(8), None, **{kind: limit}), Answer(batch).start(tokens(8, 1), 60)
        none = Answer(batch).start(tokens(8, 2), 30, time=0.0)
        run(batch)
    assert "before its turn came" in str(none.ends[0])
    end = few.ends[0]
    assert isinstance(end, BudgetError) or end.stop_reason == kind  # on a loaded machine, before its first token
    assert other.report.stop_reason == "length"


def test_any_number_of_threads_may_generate(session: Session) -> None:
    prompts = [tokens(6 + each, each) for each in range(2 * SEQUENCES)]
    with session.batch() as batch:
        expected = []
        for prompt in prompts:
            expected.append(batch.generate(prompt, max_tokens=15, ignore_eos=True))
        found: dict[int, str] = {}

        def work(number: int) -> None:
            found[number] = batch.generate(prompts[number], max_tokens=15, ignore_eos=True)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(prompts))]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert [found[number] for number in range(len(prompts))] == expected


def test_session_and_its_batch_take_turns(model: Model) -> None:
    with load(model, sequences=SEQUENCES, max_kv_size=ROWS, threads=2) as session:
        before = session.generate(tokens(9), max_tokens=9, ignore_eos=True)
        batch = session.batch()
        answer = Answer(batch).start(tokens(9), None)
        assert batch.step()
        for call in (session.batch, session.reset, lambda: session.stream(tokens(3))):
            with pytest.raises(BusyError):
                call()
        batch.close()
        assert answer.report.stop_reason == "interrupted"
        with pytest.raises(InputError, match="closed"):
            batch.generate(tokens(3))
        assert session.generate(tokens(9), max_tokens=9, ignore_eos=True) == before
        batch = session.batch()
        answer = Answer(batch).start(tokens(9), None)
        batch.step()
    assert answer.report.stop_reason == "interrupted"
    assert batch.closed


def test_trim_takes_rows_of_every_sequence(model: Model) -> None:
    with load(model, sequences=SEQUENCES, max_kv_size=512, threads=2) as session, session.batch() as batch:
        answers = [Answer(batch).start(tokens(300, each), None) for each in range(SEQUENCES)]
        run_until(batch, lambda: all(each.pieces for each in answers))
        session.trim(1.0)
        before = [len(each.pieces) for each in answers]
        run_until(batch, lambda: all(len(each.pieces) > one for each, one in zip(answers, before, strict=True)))
    assert {each.report.kv.capacity for each in answers} == {256}
    assert all(each.report.kv.evicted for each in answers)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 12))])
def test_any_schedule_ends_with_answers_of_one_alone(batch: Batch, seed: int) -> None:
    """Generations of all classes and tenants, which begin, are cancelled and preempted at any time."""
    rng = np.random.default_rng([4, seed])
    found: dict[tuple[int, int], str] = {}
    started: list[tuple[Answer, tuple[int, int]]] = []

    def start(kind: int, most: int, **options: Any) -> Answer:
        prompt = np.concatenate([tokens(20), tokens(1 + 13 * kind, kind)])
        sampling = SamplingParams(temperature=0.8 * (kind % 2), seed=kind)
        return Answer(batch).start(prompt, 4 + 9 * most, sampling=sampling, **options)

    for _ in range(100):
        event = rng.random()
        if event < 0.25:
            kind, most, priority, tenant = (int(rng.integers(high)) for high in (6, 3, 3, 2))
            started.append((start(kind, most, priority=priority, tenant=tenant), (kind, most)))
        elif event < 0.3 and started:
            started[rng.integers(len(started))][0].cancel()
        else:
            batch.step()
    left = 0
    while batch.step():
        left += 1
        assert left < 100 * len(started)
    assert batch.free == SEQUENCES
    for slot in batch._slots.all:
        assert slot.engine.kv.length == len(slot.tokens.rows.fed)
    for answer, which in started:
        (end,) = answer.ends
        if isinstance(end, RunReport) and end.stop_reason == "length":
            assert found.setdefault(which, end.text or "") == end.text
        else:
            assert answer.ticket.cancelled
    for which, text in found.items():
        alone = start(*which, tenant="alone")
        run(batch)
        assert alone.report.text == text
