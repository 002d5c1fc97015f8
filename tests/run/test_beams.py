"""Beam search against transformers' (tests/golden/beams.py)."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, open_golden
from fork_server import COMMAND, forking

import edge
from edge.errors import InputError
from edge.grammar.grammar import Grammar
from edge.model.model import Model, open_model
from edge.run.starting.loading import load

with np.load(GOLDEN / "beams.npz") as found:
    FOUND = dict(found)
CASES = json.loads(str(FOUND.pop("cases")))


@pytest.fixture
def model() -> Model:
    return open_model(GOLDEN / "llama-gqa-tied.gguf")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("index", range(len(CASES)))
def test_beams_match_transformers(model: Model, index: int, backend: str) -> None:
    beams, penalty, most, ends = CASES[index]
    model.tokenizer.end_ids = frozenset(ends)
    with load(model, backend=backend, max_kv_size=64) as session:
        text = session.generate(
            FOUND[f"{index}.prompt"],
            beams=beams,
            length_penalty=penalty,
            max_tokens=most,
            sampling=edge.SamplingParams(),
        )
        report = session.report
        assert report.beams is not None
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
    ({"length_penalty": float("nan"), "beams": None}, "length.penalty must be"), ({"stop": "x"}, "goes without .*stop"),
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


def test_on_command_line() -> None:
    command = forking(COMMAND, "edge", "run", str(GOLDEN / "llama-gqa-tied.gguf"), "Hi", "--backend", "reference")
    done = subprocess.run(
        [*command, "--beams", "2", "-n", "5", "--json", "--ignore-eos"], capture_output=True, check=True
    )
    report = json.loads(done.stdout)
    assert len(report["beams"]) == 2
    assert report["beams"][0]["text"].startswith(report["text"])
