"""A small model that drafts for another: answers stay as they are."""

from __future__ import annotations

import numpy as np
from conftest import GOLDEN
from drafters import always_drafting
from test_mtp_drafts import WARM, answers

LARGE, OTHER = GOLDEN / "llama-gqa-tied.gguf", GOLDEN / "llama-one-layer.gguf"
PROMPT = np.random.default_rng(2).integers(5, 200, 60).astype(np.int32)
PROMPTS = (PROMPT, PROMPT[:9], np.append(PROMPT[:50], 7))

always = always_drafting()


def test_model_that_drafts_for_itself_is_right(always: None) -> None:
    texts, reports, _ = answers(LARGE, prompts=PROMPTS, draft=LARGE)
    assert texts == answers(LARGE, prompts=PROMPTS, speculate="off")[0]
    for report in reports:
        assert report.drafted.tokens > 55  # of 80; where a pass verifies three drafts (`most_drafts`), 59
        assert report.drafted.accepted > 0.9 * report.drafted.tokens  # chunks sum in another order than steps


def test_another_model_changes_no_token(always: None) -> None:
    """Evictions included, of both caches."""
    texts, reports, _ = answers(LARGE, WARM, PROMPTS, draft=OTHER, max_kv_size=128)
    plain, without, _ = answers(LARGE, WARM, PROMPTS, speculate="off", max_kv_size=128)
    assert texts == plain
    assert [each.kv for each in reports] == [each.kv for each in without]
    assert all(each.drafted and each.drafted.tokens for each in reports)
    assert reports[-1].kv.evicted
