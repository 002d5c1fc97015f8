"""Beam search against transformers' (tests/golden/beams.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from threading import Thread
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive, open_golden

import edge
from edge.backends.base import BatchedEngine
from edge.devices.memory import memory_use
from edge.errors import BudgetError, EngineError, InputError
from edge.grammar.grammar import Grammar
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.engines import plan_here
from edge.run.branching.several import side_by_side
from edge.run.starting.loading import load

with np.load(GOLDEN / "beams.npz") as found:
    FOUND = dict(found)
SEQUENCES = 5  # as in test_batch.py, which compiles the same code
CASES = json.loads(str(FOUND.pop("cases")))


@pytest.fixture
def model() -> Model:
    return open_model(GOLDEN / "llama-gqa-tied.gguf")


@pytest.mark.parametrize(("index", "backend", "sequences"), [
    exhaustive(at, backend, count) if (name, count) in (("gemma3", SEQUENCES), ("gemma3", 1), ("qwen35", 1))
    and backend == "cpu" else (at, backend, count)
    for at, (name, *_) in enumerate(CASES)
    for backend, count in [("reference", 1), ("cpu", 1), ("cpu", SEQUENCES)]
])  # fmt: skip
def test_beams_match_transformers(index: int, backend: str, sequences: int) -> None:
    """Also those of models with windows or recurrent states, of which a beam has a copy of its own."""
    name, beams, penalty, most, ends = CASES[index]
    model = open_model(GOLDEN / f"{name}.gguf")
    model.tokenizer.end_ids = frozenset(ends)
    with load(model, backend=backend, max_kv_size=64, sequences=sequences) as session:
        text = session.generate(
            FOUND[f"{index}.prompt"],
            beams=beams,
            length_penalty=penalty,
            max_tokens=most,
            sampling=edge.SamplingParams(),
        )
        report = session.report
        expected = [[token for token in row if token >= 0] for row in FOUND[f"{index}.tokens"].tolist()]
        assert [list(each.tokens) for each in report.beams] == expected
        scores = [each.score for each in report.beams]
        assert scores == pytest.approx(FOUND[f"{index}.scores"].tolist(), rel=5e-3, abs=5e-3)
        ended = expected[0][-1] in ends
        assert report.stop_reason == ("eos" if ended else "length")
        assert report.tokens.generated == len(expected[0]) - ended
        said = expected[0][:-1] if ended else expected[0]
        assert text == report.text
        assert session.tokenizer.decode(said).startswith(text)  # characters that are not complete are left out
        # The conversation goes on behind the best answer.
        follow = np.array([70, 71], np.int32)
        session.generate(follow, follow_up=True, max_tokens=1)
        assert session.report.tokens.prompt == report.tokens.generated + 2


def test_one_beam_is_greedy(model: Model) -> None:
    prompt = open_golden("llama-gqa-tied").tokens[:9]
    with load(model, backend="reference", max_kv_size=64) as session:
        greedy = session.generate(prompt, max_tokens=9, sampling=edge.SamplingParams())
        assert session.generate(prompt, max_tokens=9, beams=1) == greedy


@pytest.mark.parametrize(("options", "words"), [
    ({"beams": 0}, "from 1 to 64"), ({"beams": True}, "from 1 to 64"),
    ({"length_penalty": float("nan")}, "length.penalty must be"),
    ({"length_penalty": float("nan"), "beams": None}, "length.penalty must be"),
    ({"length_penalty": 2.0, "beams": None}, "state .*beams"), ({"stop": "x"}, "goes without .*stop"),
    ({"grammar": Grammar(regex="a")}, "goes without a grammar"), ({"logprobs": 0}, "goes without logprobs"),
    ({"sampling": edge.SamplingParams(temperature=1.0)}, "goes without a temperature"),
    ({"max_tokens": None}, "needs a .*max.tokens"), ({"max_tokens": 60}, "needs KV rows"),
])  # fmt: skip
def test_beam_search_refuses_other_options(model: Model, options: dict[str, Any], words: str) -> None:
    prompt = open_golden("llama-gqa-tied").tokens[:9]
    with load(model, backend="reference", max_kv_size=64) as session, pytest.raises(InputError, match=words):
        session.generate(prompt, **{"beams": 2, "max_tokens": 4, **options})


def test_budget_ends_search(model: Model) -> None:
    """With the best of what there was."""
    with load(model, backend="reference", max_kv_size=64) as session:
        forward, session_engine, passes = session.engine.forward, session.engine, 0

        def counted(tokens: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes == 12:
                session.interrupt()
            return forward(tokens)

        session_engine.forward = counted  # type: ignore[method-assign]
        text = session.generate(open_golden("llama-gqa-tied").tokens[:9], beams=3, max_tokens=20, ignore_eos=True)
        assert session.report.stop_reason == "interrupted"
        assert 1 <= session.report.tokens.generated < 20
        assert text == session.report.text


@pytest.mark.parametrize(("sequences", "policy"), [(1, "streaming"), (SEQUENCES, "full"), (SEQUENCES, "streaming")])
def test_trim_ends_search_with_best_so_far(model: Model, sequences: int, policy: str) -> None:
    """Its rows stay, since it returns to them."""
    prompt = np.arange(400, dtype=np.int32) % 190 + 3
    with load(model, backend="cpu", max_kv_size=480, sequences=sequences, kv_policy=policy) as session:
        name = "forward_batch" if sequences > 1 else "forward"
        forward = getattr(session.engine, name)

        def trimmed(*arguments: Any) -> Any:
            if session.engine.kv.length == 405 and session.engine.kv.capacity == 480:
                asking = Thread(target=session.trim, args=(1.0,))
                asking.start()
                asking.join()
            return forward(*arguments)

        setattr(session.engine, name, trimmed)
        text = session.generate(prompt, beams=3, max_tokens=40, ignore_eos=True)
        report = session.report
        assert report.stop_reason == "memory"
        assert 1 <= report.tokens.generated < 40
        assert text == report.text
        assert session.engine.kv.capacity < 480
        if policy == "streaming":
            session.generate(np.array([70], np.int32), follow_up=True, max_tokens=1)
            assert session.report.tokens.prompt == report.tokens.generated + 1


def test_failed_search_frees_rows_of_beams(model: Model) -> None:
    with load(model, backend="cpu", max_kv_size=64, sequences=SEQUENCES) as session:
        engine = cast(BatchedEngine, session.engine)
        forward, lanes = engine.forward_batch, [engine.sequence(each).kv for each in range(1, SEQUENCES)]

        def failing(tokens: Any, sequences: Any) -> Any:
            if any(each.length > 10 for each in lanes):
                raise EngineError("the pass failed")
            return forward(tokens, sequences)

        engine.forward_batch = failing  # type: ignore[method-assign]
        with pytest.raises(EngineError):
            session.generate(open_golden("llama-gqa-tied").tokens[:9], beams=3, max_tokens=20, ignore_eos=True)
        assert not any(each.length for each in lanes)


def test_beams_take_one_cache_where_several_are_too_small(smollm2: Model) -> None:
    found, process = set(), memory_use()  # whose memory a plan counts
    for memory in range(process.rss + (100 << 20), process.peak + (500 << 20), 40 << 20):
        options = Options(memory=memory, expected_tokens=1000)
        count = side_by_side(smollm2, options, 8, all_or_one=True)
        try:
            wanted, rows = (
                plan_here(smollm2.file, smollm2.spec, replace(options, sequences=each))[1].config.capacity
                for each in (1, count)
            )
        except BudgetError:
            continue
        assert rows >= min(wanted, 1000)
        found.add(count)
    assert found == {1, 8}
