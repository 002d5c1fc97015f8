"""Conversations: what was said and what the cache holds stay one, whatever is taken back, saved, loaded or evicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from edge.errors import InputError
from edge.model.model import Model, open_model
from edge.run.branching.branches import Fork
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.types import IntArray

MODEL = "llama-gqa-tied"  # its template is ChatML, its tokens are bytes
SHORT = {"max_tokens": 6, "ignore_eos": True}
Open = Callable[..., Session]


@lru_cache
def model_of(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def ask(talk: Conversation, text: str, **options: Any) -> str:
    return "".join(talk.say(text, **{**SHORT, **options}))


def chatml(model: Model, messages: list[tuple[str, str]]) -> IntArray:
    """The ids of a whole conversation, up to where the assistant begins, in one piece."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return model.tokenizer.encode(f"{text}<|im_start|>assistant\n", special=True)  # BOS is <|im_start|>


def test_undone_turn_leaves_no_trace(open_session: Open) -> None:
    talk, other = Conversation(open_session()), Conversation(open_session())
    for each in (talk, other):
        ask(each, "one")
        ask(each, "two")
    ask(talk, "never said", max_tokens=9)
    assert talk.undo() == "never said"
    assert not talk.replays  # the rows of the first two are still there
    assert talk.session.engine.kv.length == other.session.engine.kv.length
    assert ask(talk, "three") == ask(other, "three")
    assert talk.messages == other.messages
    assert [talk.undo() for _ in range(3)] == ["three", "two", "one"]
    assert talk.messages == []
    with pytest.raises(InputError, match="no turn to take back"):
        talk.undo()
    fresh = Conversation(open_session())
    assert ask(talk, "anew") == ask(fresh, "anew")


@pytest.mark.parametrize("turns", [0, 1])
def test_question_cancelled_in_its_prompt_is_taken_back(open_session: Open, turns: int) -> None:
    talk, other = Conversation(open_session(prefill_step_size=16)), Conversation(open_session(prefill_step_size=16))
    for each in (talk, other)[: 2 * turns]:
        ask(each, "one")
    assert ask(talk, "never answered " * 9, on_prefill=lambda *_: talk.session.interrupt()) == ""
    report = talk.session.report
    assert (report.stop_reason, report.tokens.generated) == ("interrupted", 0)
    assert report.tokens.ran == 16
    assert talk.messages == other.messages
    assert not talk.replays
    assert ask(talk, "two") == ask(other, "two")
    assert talk.session.engine.kv.length == other.session.engine.kv.length


@pytest.mark.parametrize(("policy", "rows"), [("streaming", 80), ("h2o", 500)])
def test_lost_rows_are_run_again(open_session: Open, policy: str, rows: int) -> None:
    """Rows are evicted, or h2o has attention from queries that were taken back."""
    options = {"backend": "cpu", "kv_dtype": "f32"} if policy == "h2o" else {}
    session = open_session(kv_policy=policy, max_kv_size=rows, **options)
    talk = Conversation(session)
    for text in ("one", "two", "three"):
        ask(talk, text)
    assert bool(talk.evicted) == (policy == "streaming")
    talk.undo()
    assert talk.replays
    messages = [(message["role"], message["content"]) for message in talk.messages]
    answer = ask(talk, "four")
    whole = chatml(session.model, [*messages, ("user", "four")])
    assert answer == session.generate(whole, **SHORT)


def test_conversation_comes_back_from_its_file(open_session: Open, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    messages = [("system", "Be brief."), ("user", "naïve 你好\n<|im_end|>"), ("assistant", "Yes."), ("user", "Why?")]
    path.write_text(json.dumps([{"role": role, "content": content} for role, content in messages]))
    session = open_session()
    talk = Conversation(session, system="Be long.")
    ask(talk, "one")
    talk.load(path)
    assert talk.system == "Be brief."
    assert talk.replays
    answer = "".join(talk.retry(**SHORT))  # it waits for one
    plain = [(role, content.replace("<|im_end|>", "@")) for role, content in messages]
    whole = chatml(session.model, plain)
    at = int(np.flatnonzero(whole == session.model.tokenizer.encode("@")[0])[0])
    typed = session.model.tokenizer.encode("<|im_end|>")  # no control token where it is typed
    assert answer == session.generate(np.concatenate([whole[:at], typed, whole[at + 1 :]]), **SHORT)

    talk.load(path)
    "".join(talk.retry(**SHORT))
    ask(talk, "And?")
    talk.save(path)
    assert json.loads(path.read_text("utf-8")) == {"messages": talk.messages}
    saved = path.read_text("utf-8")
    assert "你好" in saved
    other = Conversation(open_session())
    other.load(path)
    assert other.messages == talk.messages
    path.write_text(
        json.dumps([{"role": each, "content": "x" * (each == "user")} for each in ("user", "assistant") * 2])
    )
    other.load(path)
    assert [each["content"] for each in other.messages] == ["x", "", "x"]  # an empty answer, and a question
    talk.reset()
    assert talk.messages == [{"role": "system", "content": "Be brief."}]


@pytest.mark.parametrize(("text", "says"), [
    (None, "no such file"), ("", "not JSON"), ("[" * 100_000, "not JSON"), ("{}", "no saved conversation"),
    ("[]", "no saved conversation"), ('{"messages": 3}', "no saved conversation"),
    ("[3]", "message 1 must have a role"),
    ('[{"role": "tool", "content": "x"}]', "message 1 is the tool's, where the user's must follow"),
    ('[{"role": "user", "content": "x", "tool_calls": [{}]}]', "message 1, call 1 must be an object"),
    ('[{"role": "user", "content": ["x"]}]',
     "message 1 must have a role (system, user, assistant or tool) and a content"),
    ('[{"role": "user", "content": ""}]', "message 1 is empty"),
    ('[{"role": "assistant", "content": "x"}]', "message 1 is the assistant's, where the user's must follow"),
    ('[{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]', "message 2 is the system's"),
    ('[{"role": "system", "content": "x"}, {"role": "user", "content": "x"}, {"role": "user", "content": "x"}]',
     "message 3 is the user's, where the assistant's must follow"),
])  # fmt: skip
def test_invalid_conversation_changes_nothing(open_session: Open, tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "talk.json"
    if text is not None:
        path.write_text(text)
    talk = Conversation(open_session(), system="s")
    ask(talk, "one")
    before = talk.messages
    with pytest.raises(InputError) as caught:
        talk.load(path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert talk.messages == before
    assert not talk.replays
    if text:
        with pytest.raises(InputError, match="holds no conversation"):
            talk.save(path)
        assert path.read_text() == text


def test_another_system_prompt_is_there_from_beginning(open_session: Open) -> None:
    session = open_session()
    talk = Conversation(session, system="Be brief.")
    answer = ask(talk, "one")
    talk.system = "Be long."
    said = ask(talk, "two")
    whole = chatml(session.model, [("system", "Be long."), ("user", "one"), ("assistant", answer), ("user", "two")])
    assert said == session.generate(whole, **SHORT)


def test_failed_turn_is_not_kept(open_session: Open) -> None:
    talk = Conversation(open_session(kv_policy="full", max_kv_size=100))
    before = ask(talk, "one")
    with pytest.raises(InputError, match="free KV rows"):
        ask(talk, "two" * 100)
    assert [turn["content"] for turn in talk.messages] == ["one", before]
    other = Conversation(open_session(kv_policy="full", max_kv_size=100))
    ask(other, "one")
    assert ask(talk, "two") == ask(other, "two")


@pytest.mark.parametrize("model", ["llama-gqa-tied", "gemma2", "phi3"])
@given(st.text(min_size=1, max_size=8).filter(str.strip), st.sampled_from([None, "Be brief."]))
@settings(max_examples=examples(20))
def test_system_prompt_rows_are_shared(model: str, text: str, system: str | None) -> None:
    opened = model_of(model)
    rows = opened.system_rows(system)
    one, other = (opened.encode_prompt(each, system=system) for each in (text, f"?{text}"))
    np.testing.assert_array_equal(one[:rows], other[:rows])
    assert opened.tokenizer.text(int(other[rows])) in ("?", " ?", "▁?", "▁")


def test_summary_replaces_old_turns_until_undo(open_session: Open) -> None:
    talk, other = Conversation(open_session(), system="Be brief."), Conversation(open_session(), system="Be brief.")
    for text in ("one", "two", "three", "four"):
        assert ask(talk, text) == ask(other, text)
    said = talk.messages
    assert talk.summarize(at=1.0) is None  # there is room
    with pytest.raises(InputError, match="from 0 to 1"):
        talk.summarize(at=2)
    summary = talk.summarize(at=0.0)
    assert (summary.turns, talk.messages) == (2, said)
    assert talk.replays
    told = f"Be brief.\n\nWhat was said before, in short: {summary.text}"
    behind = Conversation(open_session(), system=told)
    behind._turns, behind._held = talk._turns[2:], False
    assert ask(talk, "five") == ask(behind, "five")
    report = talk.session.report
    assert report.tokens == behind.session.report.tokens
    assert [talk.undo() for _ in range(2)] == ["five", "four"]
    assert talk.summary is not None
    assert talk.undo() == "three"  # the last that the summary does not stand for
    assert talk.summary is None
    assert [other.undo() for _ in range(2)] == ["four", "three"]
    other._held = False  # random answers are not the bytes that their texts give
    assert ask(talk, "anew") == ask(other, "anew")


def test_interrupted_summary_changes_nothing(open_session: Open) -> None:
    def filled(**options: Any) -> Conversation:
        talk = Conversation(open_session(**options))
        for text in ("one", "two", "three"):
            ask(talk, text)
        return talk

    talk = filled(kv_policy="full", max_kv_size=200)  # of which the turns take 90
    report, said = talk.session.report, talk.messages
    assert talk.summarize(at=0.0) is None
    assert talk.session.report is report
    talk = filled()
    forked = talk.session.fork

    def fork(n: int) -> Fork:
        """Interrupt before its first pass."""
        found = forked(n)
        talk.session.interrupt()
        return found

    talk.session.fork = fork  # type: ignore[method-assign]
    assert talk.summarize(at=0.0) is None
    assert (talk.summary, talk.messages) == (None, said)
