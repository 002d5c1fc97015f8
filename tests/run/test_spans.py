"""Pictures' rows in a run: positions of several components, spans that see all of themselves, and where passes end.

Answers are compared with those of the reference engine that runs the prompt in one pass;
`tests/model/test_picture_rows.py` compares such passes with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any

import numpy as np
import pytest
from conftest import require
from test_architectures import open_family

from edge.errors import InputError
from edge.model.parts.given import GivenRows
from edge.model.parts.prompt import Prompt
from edge.prompt_cache.cache import PromptCache
from edge.run.batching.batch import Batch
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import IntArray

GRID, BEFORE, BEHIND = (3, 4), 70, 3
ROWS = GRID[0] * GRID[1]
WHOLE = {"qwen35": False, "gemma3": True, "llama-gqa-tied": False}
on_kinds = pytest.mark.parametrize("name", WHOLE)


@dataclass
class Answer:
    """An answer, and the log-probabilities of its tokens, which differ where pictures do."""

    text: str
    logprobs: list[float]

    def __eq__(self, other: Any) -> bool:
        return (self.text, pytest.approx(self.logprobs, abs=1e-3)) == (other.text, other.logprobs)


@dataclass(frozen=True)
class Case:
    """A text with a picture in it, and the answer to it."""

    name: str
    given: GivenRows
    tokens: IntArray

    @property
    def prompt(self) -> Prompt:
        return Prompt([self.tokens], given=self.given)

    @property
    def answer(self) -> Answer:
        return answer_in_one_pass(self.name, self.tokens.tobytes())


def opened(name: str, backend: str = "reference", **options: Any) -> Session:
    require(backend)
    path = open_family(name).model.file.path
    return load(path, backend=backend, kv_dtype="f32", threads=1, **{"max_kv_size": 192, **options})


def said(session: Session, prompt: Prompt, **options: Any) -> Answer:
    return all_said(session, [prompt], **options)[0]


def all_said(session: Session | Batch, prompts: list[Prompt], **options: Any) -> list[Answer]:
    """Answers, a piece of each in turn."""
    found = [list[float]() for _ in prompts]

    def begin(prompt: Prompt, own: list[float]) -> Iterator[str]:
        return session.stream(
            prompt, max_tokens=12, ignore_eos=True, logprobs=0, on_logprob=lambda each: own.append(each.logprob),
            **options,
        )  # fmt: skip

    turns = zip_longest(*map(begin, prompts, found), fillvalue="")
    texts = map("".join, zip(*turns, strict=True))
    return [Answer(*each) for each in zip(texts, found, strict=True)]


def case(name: str, seed: int = 0) -> Case:
    model = open_family(name).model
    given, rng = GivenRows.of(model.spec), np.random.default_rng(seed)
    rows = rng.standard_normal((ROWS, model.spec.hidden)).astype(np.float32)
    text = np.random.default_rng(1).integers(3, 250, BEFORE + BEHIND).astype(np.int32)
    picture = given.add(rows, GRID, WHOLE[name])
    found = Case(name, given, np.concatenate([text[:BEFORE], picture, text[BEFORE:]]))
    _cases[name, found.tokens.tobytes()] = found
    return found


_cases = dict[tuple[str, bytes], Case]()


@cache
def answer_in_one_pass(name: str, tokens: bytes) -> Answer:
    with opened(name, prefill_step_size=96) as session:
        return said(session, _cases[name, tokens].prompt)


@on_kinds
@pytest.mark.parametrize("backend", ["reference", "cpu", "llamacpp"])
def test_answers_do_not_depend_on_the_chunk(name: str, backend: str) -> None:
    each = case(name)
    with opened(name, backend, prefill_step_size=13) as session:
        assert said(session, each.prompt) == each.answer
        assert session.report.tokens.prompt == each.tokens.size
    assert case(name, seed=1).answer != each.answer


@on_kinds
def test_prompt_cache_knows_pictures(name: str) -> None:
    """The same prompt again, and the same text around another picture."""
    first, other, prompts = case(name), case(name, seed=1), PromptCache(memory="32MiB")
    for each in (first, first, other, first):
        with opened(name, prefill_step_size=16, prompt_cache=prompts) as session:
            assert said(session, each.prompt) == each.answer
            reused = session.report.tokens.reused
    assert reused == (64 if name == "qwen35" else first.tokens.size - 1)


def test_a_picture_goes_on_behind_a_reused_half() -> None:
    """Rows end within the picture, whose other half then runs at its own positions."""
    each = case("qwen35")
    engine: Any = opened("qwen35").engine
    whole = engine.forward_all(each.tokens, each.given, each.given.places(each.tokens, 0)).copy()
    engine.kv.truncate(0)
    for part in (slice(0, BEFORE + 5), slice(BEFORE + 5, BEFORE + 7), slice(BEFORE + 7, None)):
        tokens = each.tokens[part]
        found = engine.forward_all(tokens, each.given, each.given.places(tokens, engine.kv.next_position))
        np.testing.assert_allclose(found, whole[part], atol=2e-4)
    assert engine.kv.next_position == BEFORE + max(GRID) + BEHIND
    engine.close()


@on_kinds
def test_turns_with_pictures_are_taken_back_exactly(name: str) -> None:
    first, other = case(name), case(name, seed=1)
    with opened(name, "cpu", prefill_step_size=16, max_kv_size=256) as session:
        assert said(session, first.prompt) == first.answer
        mark = session.mark(hold=True)
        second = said(session, other.prompt, follow_up=True)
        position = session.engine.kv.next_position
        assert session.rewind(mark)
        said(session, first.prompt, follow_up=True)
        assert session.rewind(mark)
        assert (said(session, other.prompt, follow_up=True), session.engine.kv.next_position) == (second, position)
    with opened(name, prefill_step_size=128, max_kv_size=256) as session:
        said(session, first.prompt)
        assert said(session, other.prompt, follow_up=True) == second


@on_kinds
def test_sequences_with_pictures_side_by_side(name: str) -> None:
    cases = [case(name), case(name, seed=1), case(name)]  # the third shares rows of the first
    with opened(name, "cpu", prefill_step_size=16, sequences=2) as session, session.batch() as batch:
        assert all_said(batch, [each.prompt for each in cases]) == [each.answer for each in cases]


def test_oversized_pictures_are_refused_before_running() -> None:
    each = case("gemma3")
    with opened("gemma3", prefill_step_size=8) as session:
        with pytest.raises(InputError, match=r"12 tokens see each other.*at most 8: use --prefill-step-size 12"):
            said(session, each.prompt)
        assert session.engine.kv.length == 0
    with pytest.raises(InputError, match="a grid of 3 × 5 cells does not have 12 rows"):
        each.given.add(np.zeros((12, each.given.hidden), np.float32), (3, 5))
