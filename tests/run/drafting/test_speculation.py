"""Drafts copied from earlier text, and how many of their tokens are verified. Their twin in apps, which
`tests/apps/session/test_runtime_drafts.py` compares with them, holds what is learned of drafts that were wrong."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.devices.power import app_meter
from edge.plan.plan import DRAFT_TEXT
from edge.run.drafting.ahead import Ahead
from edge.run.drafting.drafts import Drafts
from edge.run.drafting.power import ENOUGH, PassPower

FEW = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def expected_draft(tokens: list[int], most: int) -> tuple[int, list[int]]:
    """The longest match, at most 64, and what follows the latest place of it, by comparing all places."""
    match, place = 0, -1
    for at in range(len(tokens) - 1):
        count = 0
        while count < min(at + 1, 64) and tokens[at - count] == tokens[-1 - count]:
            count += 1
        if count and count >= match:
            match, place = count, at
    follows = tokens[place + 1 :]
    return match, [follows[at % len(follows)] for at in range(most)] if match else []


@st.composite
def repetitive_texts(draw: st.DrawFn) -> list[list[int]]:
    """Pieces of one text: few different tokens, and copies of what was before, with many places of short matches."""
    pieces: list[list[int]] = []
    for _ in range(draw(st.integers(1, 8))):
        text = [token for piece in pieces for token in piece]
        if text and draw(st.booleans()):
            begins, length = draw(st.integers(0, len(text) - 1)), draw(st.integers(1, 90))
            pieces.append(text[begins : begins + length])
        else:
            pieces.append(draw(st.one_of(FEW, st.lists(st.just(1), min_size=1, max_size=100))))
    return pieces


def test_newest_text_stays_once_there_is_too_much() -> None:
    drafts, text = Drafts(), np.arange(DRAFT_TEXT // 2, dtype=np.int32)
    for first in (0, 1, 2):
        drafts.add(text + first * text.size)
        assert drafts.text.size <= DRAFT_TEXT
    drafts.add(text[:10] + 2 * text.size)
    assert drafts.draft(3).tolist() == [2 * text.size + each for each in (10, 11, 12)]


@given(repetitive_texts(), st.integers(1, 9), st.booleans())
def test_draft_follows_longest_match(pieces: list[list[int]], most: int, singly: bool) -> None:
    drafts, text = Drafts(), list[int]()
    for piece in pieces:
        for part in [[token] for token in piece] if singly else [piece]:
            drafts.add(np.array(part, np.int32))
            if singly and len(text) % 3:
                drafts.draft(most)  # which changes nothing
        text += piece
        draft = drafts.draft(most).tolist()
        assert (drafts.match, draft) == expected_draft(text, most)


@given(repetitive_texts(), st.integers(0, 30), st.integers(1, 5))
def test_dropped_tokens_are_not_copied(pieces: list[list[int]], dropped: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("edge.run.drafting.drafts.DRAFT_TEXT", 128)
        drafts, text = Drafts(), list[int]()
        for piece in pieces:
            for token in piece:
                drafts.add(np.array([token], np.int32))
                text = [*(text[-64:] if len(text) == 128 else text), token]
                assert drafts.text.tolist() == text
            drafts.draft(most)
            drafts.drop(dropped)
            text = text[: max(0, len(text) - dropped)]
            drafts.add(np.array(piece[:3], np.int32))
            text = [*(text[-64:] if len(text) + len(piece[:3]) > 128 else text), *piece[:3]]
            assert drafts.draft(most).tolist() == expected_draft(text, most)[1]


AVX2_COSTS = {1: 1.0, 2: 1.46, 3: 1.7, 4: 1.96}  # docs/figures.md


@pytest.mark.parametrize(
    ("costs", "watts", "most"),
    [
        (AVX2_COSTS, 1.0, 3),
        (AVX2_COSTS, 3.0, 0),  # 4 tokens in 1.96 times the seconds, and 5.9 times the joules
        ({1: 1.0, 2: 2.1, 3: 3.2, 4: 4.3}, 0.1, 0),  # few joules, and more seconds than one by one
    ],
)
def test_drafts_pay_by_seconds_and_by_joules(costs: dict[int, float], watts: float, most: int) -> None:
    """watts: of passes over several tokens, in those of passes over one."""
    now = joules = 0.0

    def sensor() -> float:
        if joules < 0:
            raise OSError("the sensor is gone")
        return joules

    one = Ahead(3, power=PassPower(app_meter(sensor), lambda: now))

    def run(rows: int) -> None:
        nonlocal now, joules
        one.power.start(rows)
        now += costs[rows]
        joules += costs[rows] * (1.0 if rows == 1 else watts)
        one.time(1, rows - 1, costs[rows])

    one.drafts.add(np.tile(np.arange(100, dtype=np.int32), 2))
    for _ in range(ENOUGH):
        assert one.power.known is False
        for rows in costs:
            run(rows)
    assert one.power.known
    assert one.propose(99).size == most
    report = one.report()
    assert report.by == "seconds and joules"
    joules = -1000.0
    run(1)
    assert one.propose(99).size == (0 if costs[4] > 4 else 3)  # by seconds, as without a sensor
    assert one.report().by == "seconds"  # type: ignore[union-attr]
