"""Rewinding where rows alone restore no state: hybrids (Qwen3.5, LFM2), rings, and recurrent models on llama.cpp."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN
from test_gguf_file import GGUF
from thinking_models import ALWAYS

from edge.backends import engine_named
from edge.devices.memory import memory_use
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import Plan, make_plan
from edge.prompt_cache.cache import PromptCache
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.sampling import SamplingParams

STRING = 8
GREEDY = SamplingParams(temperature=0)
LONG = "once upon a time there was a house by the sea. " * 3
HYBRIDS = [
    ("qwen35", "reference"), ("qwen35", "cpu"), ("falcon-h1", "llamacpp"), ("qwen35", "onnx"),
    *(pytest.param(name, "cpu", marks=pytest.mark.exhaustive) for name in ("gemma3", "lfm2", "nemotron_h")),
]  # fmt: skip
SMALL = 600 << 20


@lru_cache
def model_of(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def open_session(name: str, backend: str, **options: Any) -> Session:
    return load(model_of(name), **{"backend": backend, "max_kv_size": 500, "threads": 1, "kv_dtype": None, **options})


def answer(session: Session, prompt: Any, count: int = 8, **options: Any) -> list[int]:
    """The tokens of the answer, from the rows of the cache: their texts may be parts of characters."""
    text = session.generate(prompt, max_tokens=count, sampling=GREEDY, ignore_eos=True, **options)
    return [session.engine.kv.length, *text.encode()]


def plan_of(name: str, **options: Any) -> Plan:
    return make_plan(model_of(name).spec, engine_named("cpu"), Options(max_kv_size=500, threads=1).updated(**options))


@pytest.mark.parametrize(("name", "backend"), HYBRIDS)
def test_undone_turn_of_hybrid_leaves_no_trace(name: str, backend: str) -> None:
    with open_session(name, backend) as session, open_session(name, backend) as other:
        assert session.engine.kv.has_tail
        for each in (session, other):
            answer(each, LONG)
        mark = session.mark()
        answer(session, LONG[:100], 100, follow_up=True)
        assert session.rewind(mark)
        assert session.engine.kv.length == other.engine.kv.length
        assert answer(session, "three", follow_up=True) == answer(other, "three", follow_up=True)


def test_lost_snapshot_reruns_from_earlier_one() -> None:
    with open_session("qwen35", "reference") as session, open_session("qwen35", "reference") as other:
        marks = []
        for end in (40, 41, 42):
            answer(session, LONG[:end], follow_up=bool(marks))
            marks.append(session.mark())
        session._sequence.rows.snapshots.drop(marks[1].rows)
        assert session.rewind(marks[1])
        for end in (40, 41):
            answer(other, LONG[:end], follow_up=end > 40)
        assert answer(session, "and then", follow_up=True) == answer(other, "and then", follow_up=True)


def test_long_prompt_has_ways_back_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.run.sequences.rows.SNAPSHOT_STEP", 64)
    with open_session("lfm2", "reference", prefill_step_size=48) as session:
        answer(session, np.random.default_rng(1).integers(3, 250, 300).astype(np.int32))
        snapshots = session._sequence.rows.snapshots
        assert [rows for rows in range(500) if snapshots.latest(rows)[0] == rows > 0] == [64, 128, 192, 256]


def test_plan_counts_snapshots_where_they_fit() -> None:
    memory = memory_use().rss + SMALL  # of whatever the tests before took
    plan = plan_of("qwen35", memory=memory)
    state = plan.bytes.fixed_kv
    assert plan.snapshots > 1
    assert plan.bytes.snapshots >= plan.snapshots * state
    bare = plan_of("qwen35", memory=memory, expected_tokens=400)
    assert plan.bytes.total - plan.bytes.snapshots == pytest.approx(bare.bytes.total, abs=4 << 20)
    assert plan_of("qwen35", kv_policy="h2o").snapshots == 0  # it chooses by attention, which does not come back
    assert plan_of("llama-gqa-tied").snapshots == 0


@pytest.mark.parametrize("name", ["qwen35", "gemma3"])
@pytest.mark.parametrize("cached", [False, True])
def test_earlier_thoughts_leave_hybrid_cache(name: str, cached: bool, tmp_path: Path) -> None:
    """Of a model with the template of one that thinks, and so with answers that are all thoughts."""
    file = GGUF.read(GOLDEN / f"{name}.gguf")
    file.metadata["tokenizer.chat_template"] = (STRING, ALWAYS)
    thinker = file.write(tmp_path / "thinker.gguf")
    options: dict[str, Any] = {"sampling": GREEDY, "ignore_eos": True, "max_tokens": 90, "think": 70}
    prompt_cache = PromptCache(memory="16MiB") if cached else None
    shared: dict[str, Any] = {"backend": "cpu", "threads": 1, "max_kv_size": 480, "prompt_cache": prompt_cache}
    with load(thinker, **shared) as session, load(thinker, **shared) as again:
        talk, replayed = Conversation(session), Conversation(again)
        first = "".join(talk.say(LONG[:60], **options))
        held = session.engine.kv.length
        assert session.report.thoughts is not None
        second = "".join(talk.say("and then", **options))
        assert session.report.thoughts is not None
        assert session.report.tokens.prompt < held  # the first question did not run again
        replayed._turns = [*Conversation(again)._turns]
        talk.save(thinker.with_suffix(".json"))
        replayed.load(thinker.with_suffix(".json"))
        assert replayed.undo() == "and then"
        assert "".join(replayed.say("and then", **options)) == second
        assert again.engine.kv.length == session.engine.kv.length
        assert talk.undo() == "and then"
        assert not talk.replays
        assert "".join(talk.say("and then", **options)) == second
        assert talk.messages[1]["content"] == first


@pytest.mark.parametrize(("name", "backend"), [("qwen35", "reference"), ("gemma3", "cpu")])
def test_prompts_that_share_messages_reuse_their_rows(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the last whole block of the common messages, though no prompt ended there."""
    monkeypatch.setattr("edge.prompt_cache.cache._APART", 64)
    words = "Lamps, doors and windows of a house. " * 3
    first = [{"role": "system", "content": words}, {"role": "user", "content": f"One. {words}"}]
    other = [first[0], {"role": "user", "content": f"Two. {words}"}]
    cache = PromptCache(memory="64MiB")
    with open_session(name, backend, prompt_cache=cache) as session:
        system = session.model.chat_prompt(first)
        system.first(None)
        marks, reused = system.ends, list[int]()
        for messages in (first, other, [*first, {"role": "assistant", "content": "Hm."}, *other[1:]]):
            "".join(session.stream(messages=messages, max_tokens=1, ignore_eos=True))
            reused.append(session.report.tokens.reused)
        kv, tokens = session.engine.kv, session.model.chat_prompt(other).first(None)
        # Rows that no tail follows cannot be restored.
        assert cache.known(kv, tokens[: marks[0]]) == marks[0] // 64 * 64
    assert marks[0] > 64
    assert reused == [0, marks[0] // 64 * 64, marks[1] // 64 * 64]
