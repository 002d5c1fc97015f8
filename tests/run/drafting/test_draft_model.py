"""A small model that drafts for another: answers stay as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from drafters import always_drafting
from speech_models import write_model

import edge
from edge.backends import engine_named
from edge.errors import InputError, UnsupportedError
from edge.model.drafters.draft import open_draft
from edge.options import Options
from edge.plan.plan import make_plan
from edge.run.drafting.ahead import Ahead
from edge.sampling import SamplingParams

LARGE, OTHER = GOLDEN / "llama-gqa-tied.gguf", GOLDEN / "llama-one-layer.gguf"
PROMPT = np.random.default_rng(2).integers(5, 200, 60).astype(np.int32)
GREEDY, WARM = SamplingParams(), SamplingParams(temperature=1, seed=4)

always = always_drafting()


def answers(draft: Path | None, sampling: SamplingParams, **options: Any) -> tuple[list[str], list[edge.RunReport]]:
    """To a prompt, behind it, and to the same prompt with another end."""
    with edge.load(LARGE, backend="cpu", draft=draft, **{"max_kv_size": 300, **options}) as session:
        texts, reports = [], []
        for prompt, follow_up in ((PROMPT, False), (PROMPT[:9], True), (np.append(PROMPT[:50], 7), False)):
            texts.append(
                session.generate(prompt, max_tokens=80, ignore_eos=True, sampling=sampling, follow_up=follow_up)
            )
            reports.append(session.report)
        return texts, reports


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(WARM, marks=pytest.mark.exhaustive)])
def test_model_that_drafts_for_itself_is_right(always: None, sampling: SamplingParams) -> None:
    texts, reports = answers(LARGE, sampling)
    assert texts == answers(None, sampling, speculate="off")[0]
    for report in reports:
        assert report.drafted.tokens > 55  # of 80; where a pass verifies three drafts (`most_drafts`), 59
        if sampling is GREEDY:  # the model's chunks sum in another order than its steps
            assert report.drafted.accepted > 0.9 * report.drafted.tokens


@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.exhaustive), WARM])
def test_another_model_changes_no_token(always: None, sampling: SamplingParams) -> None:
    """Evictions included, of both caches."""
    texts, reports = answers(OTHER, sampling, max_kv_size=128)
    plain, without = answers(None, sampling, speculate="off", max_kv_size=128)
    assert texts == plain
    assert [each.kv for each in reports] == [each.kv for each in without]
    assert all(each.drafted and each.drafted.tokens for each in reports)
    assert reports[-1].kv.evicted


def test_unprofitable_draft_model_drafts_no_tokens() -> None:
    one = Ahead(7, model=_Model())  # type: ignore[arg-type]
    one.drafts.begin(np.arange(9, dtype=np.int32))
    for rows in range(1, 9):
        for _ in range(50):
            one.time(1, rows - 1, 0.01 + 0.001 * rows)
    assert one.propose(99).size == 0


class _Model:
    """Drafts in no time; its share is what is believed."""

    caught_up = 99

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def follows(self, _text: np.ndarray[Any, Any], _given: int) -> bool:
        return True

    def draft(self, text: np.ndarray[Any, Any], most: int) -> np.ndarray[Any, Any]:
        assert text.size
        return np.zeros(most, np.int32)


def test_one_plan_counts_both_models() -> None:
    cpu, options = engine_named("cpu"), Options.parse(max_kv_size=300, threads=1)
    spec = edge.open_model(LARGE).spec
    plain = make_plan(spec, cpu, options, process=64 << 20)
    plan = make_plan(spec, cpu, replace(options, draft=OTHER), process=64 << 20)
    assert plan.draft.capacity == 300
    need = cpu.footprint(edge.open_model(OTHER).spec, plan.draft)
    assert plan.bytes.draft == need.weights + need.kv + need.scratch + need.runtime
    assert plan.config == plain.config
    assert plan.bytes.total == plain.bytes.total + plan.bytes.draft
    assert plan.predicted_peak == plan.bytes.total


@pytest.mark.parametrize(("draft", "options", "error", "words"), [
    (GOLDEN / "spm.gguf", {}, InputError, "its tokens are not those of "),
    (OTHER, {"speculate": "off"}, InputError, "leave one out"),
    (OTHER, {"backend": "reference"}, UnsupportedError, "for the cpu engine here, not for the reference engine"),
    (OTHER, {"kv_policy": "h2o"}, UnsupportedError, "kv.policy.h2o goes without drafts"),
    (GOLDEN / "qwen35.gguf", {}, (InputError, UnsupportedError), "recurrent layers|tokens are not"),
    ("no-such-model", {}, InputError, "no such model file: no-such-model"),
])  # fmt: skip
def test_unsuitable_draft_models_are_refused(draft: Any, options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        edge.load(LARGE, draft=draft, **{"backend": "cpu", "max_kv_size": 300, **options})


def test_model_that_hears_does_not_draft(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="continues no text"):
        open_draft(write_model(tmp_path))
