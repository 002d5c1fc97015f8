"""Log-probabilities of generated tokens and of given texts, compared with transformers' logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import CAPACITY, CHUNK, log_softmax, open_golden

import edge
from edge.errors import InputError
from edge.run.report import TokenLogprob
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.types import FloatArray, IntArray

GOLDEN_MODEL = open_golden("llama-gqa-tied")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with load(GOLDEN_MODEL.model, backend="reference", max_kv_size=128, logits_rows=8) as session:
        yield session


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_text_is_scored_as_transformers_scores_it(backend: str, rows: int) -> None:
    tokens = GOLDEN_MODEL.tokens
    expected = log_softmax(GOLDEN_MODEL.logits)
    near = 2e-2 if rows == 1 or backend == "reference" else 0.15  # a chunk's attention may be in BF16
    with load(GOLDEN_MODEL.model, backend=backend, max_kv_size=128, logits_rows=rows) as session:
        for _ in range(2):
            found = session.score(tokens, top=3)
            assert [each.token for each in found] == tokens[1:].tolist()
            for row, each in zip(expected, found, strict=False):
                assert each.logprob == pytest.approx(row[each.token], abs=near if backend == "cpu" else 1e-3)
                assert [token for token, _ in each.top] == row.argsort()[::-1][:3].tolist() or backend == "cpu"
                assert [value for _, value in each.top] == pytest.approx(np.sort(row)[::-1][:3], abs=near)
        assert session.engine.kv.length == 0


def test_long_text_is_scored_by_kept_rows() -> None:
    tokens, rows = GOLDEN_MODEL.tokens, log_softmax(GOLDEN_MODEL.stream_logits)
    options = {"max_kv_size": CAPACITY, "prefill_step_size": CHUNK, "logits_rows": CHUNK}
    with load(GOLDEN_MODEL.model, backend="reference", kv_policy="streaming", **options) as session:
        found = session.score(tokens)
        assert len(found) == tokens.size - 1
        near = [each.logprob for each in found[: CAPACITY - CHUNK]]
        assert near == pytest.approx([row[token] for row, token in zip(rows, tokens[1:], strict=False)][: len(near)],
                                     abs=1e-3)  # fmt: skip
    with (
        load(GOLDEN_MODEL.model, backend="reference", kv_policy="full", max_kv_size=CAPACITY) as session,
        pytest.raises(InputError, match=r"kv.policy"),
    ):
        session.score(tokens)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_endings_of_text_share_its_rows(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ending has the log-probabilities of the whole text, and the text before them runs once."""
    tokens, first = GOLDEN_MODEL.tokens, 30
    endings = [tokens[:34], np.append(tokens[:first], tokens[:4]), np.append(tokens[:first], tokens[7])]
    ran: list[int] = []
    near = 6e-2 if backend == "cpu" else 1e-4  # a chunk's attention may be in BF16, a single token's is not
    with load(GOLDEN_MODEL.model, backend=backend, max_kv_size=128, logits_rows=8) as session:
        whole = [session.score(each, top=1)[first - 1 :] for each in endings]
        for name in ("forward", "forward_all"):
            run = getattr(session.engine, name)
            monkeypatch.setattr(session.engine, name, lambda part, run=run: ran.append(part.size) or run(part))
        for ending, expected in zip(endings, whole, strict=True):
            found = session.score(ending, top=1, first=first, keep_rows=True)
            assert [each.token for each in found] == ending[first:].tolist()
            assert [each.logprob for each in found] == pytest.approx([each.logprob for each in expected], abs=near)
            assert [each.top[0][0] for each in found] == [each.top[0][0] for each in expected]
        assert sum(ran) == endings[0].size - 1 + 4 + 1
        assert session.engine.kv.length == endings[-1].size - 1
        session.score(tokens[:20])
        assert session.engine.kv.length == 0
        with pytest.raises(InputError, match="first token"):
            session.score(tokens[:20], first=20)


@pytest.mark.parametrize(
    "sampling",
    [
        edge.SamplingParams(),
        edge.SamplingParams(temperature=0.7, top_k=5, seed=3, repeat_penalty=1.5, logit_bias={70: 4.0}),  # type: ignore[arg-type]
    ],
)
def test_generated_logprobs_match_scores(session: Session, sampling: edge.SamplingParams) -> None:
    """Whatever was done to the logits before a token was drawn."""
    told: list[TokenLogprob] = []
    pieces = session.stream(
        GOLDEN_MODEL.tokens[:20], max_tokens=12, sampling=sampling, logprobs=4, ignore_eos=True, on_logprob=told.append
    )
    counts = [len(told) for _ in pieces]
    assert counts == sorted(counts)
    assert session.report.logprobs == tuple(told)
    assert len(told) == 12
    assert session.report.to_dict()["logprobs"][0]["token"] == told[0].token
    ran = np.concatenate([GOLDEN_MODEL.tokens[:20], [each.token for each in told]])
    scored = session.score(ran, top=4)[19:]
    for drawn, given in zip(told, scored, strict=True):
        assert (drawn.token, drawn.thought) == (given.token, False)
        assert drawn.logprob == pytest.approx(given.logprob, abs=1e-4)
        assert [token for token, _ in drawn.top] == [token for token, _ in given.top]


@pytest.mark.parametrize("top", [-1, 101, True, 1.5, "3"])
def test_invalid_logprobs_are_refused(session: Session, top: Any) -> None:
    with pytest.raises(InputError, match="from 0 to 100"):
        session.generate("Hi", logprobs=top)
    with pytest.raises(InputError, match="from 0 to 100"):
        session.score(GOLDEN_MODEL.tokens, top=top)


def test_unscorable_texts_are_refused(session: Session) -> None:
    with pytest.raises(InputError, match="at least two tokens"):
        session.score(GOLDEN_MODEL.tokens[:1])
    with pytest.raises(InputError, match="token ids"):
        session.score("text")  # type: ignore[arg-type]
    for token in (-3, session.spec.vocab):
        with pytest.raises(InputError, match="token ids must be from 0 to"):
            session.score(np.array([5, token]))


def test_processor_sees_answer_and_changes_logits(session: Session) -> None:
    seen: list[list[int]] = []

    def only(tokens: IntArray, logits: FloatArray) -> FloatArray:
        seen.append(tokens.tolist())
        return np.where(np.arange(logits.size) == 70 + len(tokens), logits, -np.inf)

    text = session.generate("Hi", logits_processor=only, max_tokens=4)
    assert text == b"".join(session.tokenizer.piece(70 + index) for index in range(4)).decode()
    assert seen == [[], [70], [70, 71], [70, 71, 72]]

    def in_place(tokens: IntArray, logits: FloatArray) -> None:
        logits[:] = -1
        logits[80] = 1

    assert session.generate("Hi", logits_processor=in_place, max_tokens=2) == 2 * session.tokenizer.piece(80).decode()
    for wrong in (lambda tokens, logits: logits[:3], lambda tokens, logits: np.array(["text"] * logits.size)):
        with pytest.raises(InputError, match="must return logits"):
            session.generate("Hi", logits_processor=wrong)
    with pytest.raises(InputError, match="NaN"):
        session.generate("Hi", logits_processor=lambda tokens, logits: logits * np.nan)
    with pytest.raises(InputError, match="must be a function"):
        session.generate("Hi", logits_processor=3)
