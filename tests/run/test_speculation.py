"""Drafts copied from earlier text, and how many of their tokens are verified."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge.errors import InputError
from edge.options import Options
from edge.plan.plan import DRAFT_TEXT
from edge.run.drafting.drafts import Drafts
from edge.run.drafting.speculation import Speculation

MOST = 7
FEW = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def _longest_match(tokens: list[int]) -> int:
    """By comparing all places."""
    found = 0
    for place in range(len(tokens) - 1):
        count = 0
        while count <= place and tokens[place - count] == tokens[-1 - count]:
            count += 1
        found = max(found, min(count, 64))
    return found


@given(FEW, st.integers(1, 9))
def test_a_draft_follows_the_longest_match(tokens: list[int], most: int) -> None:
    drafts = Drafts()
    for token in tokens:
        drafts.add(np.array([token], np.int32))
    draft = drafts.draft(most).tolist()
    longest = _longest_match(tokens)
    assert len(draft) == (most if longest else 0)
    if longest:
        assert drafts.match >= min(longest, 4)  # of many places, the latest that agree in four tokens are compared
        ends = [
            at
            for at in range(len(tokens) - 1)
            if tokens[max(0, at + 1 - drafts.match) : at + 1] == tokens[-drafts.match :]
        ]
        assert any(np.resize(tokens[at + 1 :], most).tolist() == draft for at in ends)


@given(st.lists(FEW, max_size=8))
def test_tokens_may_come_in_any_pieces(pieces: list[list[int]]) -> None:
    whole, single = Drafts(), Drafts()
    for piece in pieces:
        whole.add(np.array(piece, np.int32))
        for token in piece:
            single.add(np.array([token], np.int32))
    assert whole.draft(5).tolist() == single.draft(5).tolist()
    assert whole.match == single.match


def test_what_is_copied_is_found_again_while_it_goes_on() -> None:
    rng = np.random.default_rng(0)
    drafts, text = Drafts(), rng.integers(0, 50_000, 3000).astype(np.int32)
    drafts.add(text)
    drafts.add(text[1000:1002])
    for at in range(1002, 1100):
        assert drafts.draft(7).tolist() == text[at : at + 7].tolist()
        drafts.add(text[at : at + 1])
    assert drafts.match == 64


def test_memory_is_bounded_and_the_newest_text_stays() -> None:
    drafts, text = Drafts(), np.arange(DRAFT_TEXT // 2, dtype=np.int32)
    for _ in range(5):
        drafts.add(text)
    assert drafts._tokens.size <= DRAFT_TEXT
    drafts.add(text[:10])
    assert drafts.draft(3).tolist() == [10, 11, 12]


def _proposed(tokens: list[int], right: bool, rounds: int) -> list[int]:
    """The lengths of drafts of a text, of which all tokens are right, or none."""
    one, lengths = Speculation(MOST), []
    for _ in range(rounds):
        one.drafts.add(np.array(tokens, np.int32))
        draft = one.propose(99)
        lengths.append(draft.size)
        if draft.size:
            one.judge(draft.size, draft.size if right else 0)
    return lengths


def test_long_matches_are_drafted_in_full_and_short_ones_are_not() -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(0, 50_000, 500).tolist()
    one = Speculation(MOST)
    one.drafts.add(np.array(text, np.int32))
    assert one.propose(99).size == 0  # nothing is the same
    one.drafts.add(np.array(text[100:101], np.int32))
    assert one.propose(99).size == 0  # one token is no sign
    one.drafts.add(np.array(text[101:140], np.int32))
    assert one.propose(99).tolist() == text[140 : 140 + MOST]
    assert one.propose(3).tolist() == text[140:143]


def test_drafts_that_are_wrong_end() -> None:
    tokens = np.random.default_rng(1).integers(0, 50_000, 40).tolist()
    assert _proposed(tokens, right=True, rounds=60)[-1] == MOST
    wrong = _proposed(tokens, right=False, rounds=60)
    assert wrong[1] > 0
    assert wrong[-1] == 0


def test_a_pass_that_costs_what_its_tokens_cost_is_not_worth_a_draft() -> None:
    one = Speculation(MOST)
    for rows in range(1, 9):
        for _ in range(50):
            one.time(1, rows - 1, rows * 0.01)
    text = np.arange(100, dtype=np.int32)
    one.drafts.add(np.concatenate([text, text[:50]]))
    assert one.propose(99).size == 0


def test_only_auto_and_off_are_known() -> None:
    with pytest.raises(InputError, match="choose auto or off"):
        Options.parse(speculate="maybe")
