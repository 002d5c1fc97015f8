"""Calls in the answers of sessions: apart from text and thoughts, and conversations that go on with their results."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from shared import FOLDER
from small_models import Special
from test_cli import edge
from thinking_models import write_script
from tool_templates import GPT_OSS, QWEN3, TOOLS

from edge.errors import InputError
from edge.model.model import Model, open_model
from edge.run.conversation import Conversation
from edge.run.session import Session
from edge.run.starting.loading import load
from edge.tools.parser import ArgumentPiece, CallBegin, CallCut, CallEnd

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = Special(defined=MARKS, template=QWEN3)
MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Rain in Rome?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nI look.\n</think>\n\nOne moment.\n{CALL}<|im_end|>"
CONTEXT = 4096
LOOKED_UP: dict[str, Any] = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
}

Speak = Callable[..., AbstractContextManager[Session]]


@pytest.fixture
def speaks(tmp_path: Path) -> Speak:
    """A session whose model answers prompts of these lengths with these texts."""

    @contextmanager
    def session(*answers: tuple[int, str], **options: Any) -> Iterator[Session]:
        path = write_answers(tmp_path / "script.gguf", *answers)
        with load(path, backend="reference", **{"max_kv_size": CONTEXT, **options}) as loaded:
            yield loaded

    return session


def write_answers(path: Path, *answers: tuple[int, str]) -> Path:
    start, script = answers[0][0], list[int]()
    for at, answer in answers:
        script += [0] * (at - start - len(script))
        script += opened().tokenizer.encode(answer, special=True).tolist()
    return write_script(path, SPECIAL, start, script, CONTEXT)


@lru_cache
def opened(special: Special = SPECIAL) -> Model:
    """A model with these marks, which tells what prompts and answers are."""
    return open_model(write_script(Path(mkdtemp(dir=FOLDER)) / "m.gguf", special, 8, [2], CONTEXT))


def size(messages: list[dict[str, Any]]) -> int:
    return opened().chat_prompt(messages, tools=TOOLS).first(None).size


def with_result(content: str | None) -> list[dict[str, Any]]:
    """The conversation with a call, and its result."""
    said = {"role": "assistant", "content": content, "tool_calls": [LOOKED_UP]}
    return [*MESSAGES, said, {"role": "tool", "tool_call_id": "c1", "content": "none"}]


def test_calls_thoughts_and_text_come_apart(speaks: Speak) -> None:
    with speaks((size(MESSAGES), ANSWER)) as session:
        events, thoughts = list[Any](), list[str]()
        pieces = list(session.stream(messages=MESSAGES, tools=TOOLS, max_tokens=300, on_call=events.append,
                                     on_thought=thoughts.append))  # fmt: skip
        report = session.report
    assert "".join(pieces) == report.text == "One moment."
    assert "".join(thoughts).strip() == "I look."
    assert report.stop_reason == "tool_calls"
    (call,) = report.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Rome"})
    assert report.to_dict()["tool_calls"] == ({"id": call.id, "name": call.name, "arguments": call.arguments},)
    assert events[0] == CallBegin(0, call.id, "get_weather")
    assert "".join(event.text for event in events if isinstance(event, ArgumentPiece)) == call.arguments
    assert events[-1] == CallEnd(0)


def test_without_tools_calls_are_text(speaks: Speak) -> None:
    start = opened().chat_prompt(MESSAGES).first(None).size
    with speaks((start, ANSWER)) as session:
        text = session.generate(messages=MESSAGES, max_tokens=300)
        assert CALL in text
        assert session.report.tool_calls == ()
        assert session.report.stop_reason == "eos"


@pytest.mark.parametrize("count", [40, 70])
def test_call_that_is_cut_is_not_reported(speaks: Speak, count: int) -> None:
    with speaks((size(MESSAGES), ANSWER)) as session:
        events = list[Any]()
        text = session.generate(messages=MESSAGES, tools=TOOLS, max_tokens=count, on_call=events.append)
        report = session.report
    assert (report.tool_calls, report.stop_reason) == ((), "length")
    assert not any(isinstance(event, CallEnd) for event in events)
    assert events == [] or events[-1] == CallCut(0)
    assert text.startswith("One moment."[: len(text)])


@pytest.mark.parametrize(("missing", "reason"), [
    ("<|im_end|>", "tool_calls"), ("</tool_call><|im_end|>", "tool_calls"), ("}\n</tool_call><|im_end|>", "length"),
])  # fmt: skip
def test_call_that_is_cut_in_its_tail_is_whole(speaks: Speak, missing: str, reason: str) -> None:
    count = opened().tokenizer.encode(ANSWER.removesuffix(missing), special=True).size
    with speaks((size(MESSAGES), ANSWER)) as session:
        session.generate(messages=MESSAGES, tools=TOOLS, max_tokens=count)
        assert session.report.stop_reason == reason


def test_single_call_ends_answer_without_parallel_calls(speaks: Speak) -> None:
    with speaks((size(MESSAGES), f"{CALL}\n{CALL}<|im_end|>")) as session:
        for parallel, calls in ((False, 1), (True, 2)):
            session.generate(messages=MESSAGES, tools=TOOLS, parallel_tool_calls=parallel, max_tokens=300)
            assert len(session.report.tool_calls) == calls


def test_stop_texts_are_searched_in_text_alone(speaks: Speak) -> None:
    with speaks((size(MESSAGES), ANSWER)) as session:
        assert session.generate(messages=MESSAGES, tools=TOOLS, max_tokens=300, stop=["Rome"]) == "One moment."
        assert session.report.stop_reason == "tool_calls"
        assert session.generate(messages=MESSAGES, tools=TOOLS, max_tokens=300, stop=["moment"]) == "One "
        assert session.report.stop_reason == "stop"


def test_conversation_goes_on_with_results(speaks: Speak) -> None:
    """The rows of the call stay: only the result and what follows it are run."""
    answer = f"One moment.\n{CALL}"
    later = with_result("One moment.")
    first, second = size(MESSAGES), size(later)
    with speaks((first, f"{answer}<|im_end|>"), (second, "No rain.<|im_end|>")) as session:
        assert session.generate(messages=MESSAGES, tools=TOOLS, max_tokens=300) == "One moment."
        assert session.report.tokens.reused == 0
        rows = session.engine.kv.length
        assert session.generate(messages=later, tools=TOOLS, max_tokens=300) == "No rain."
        tokens = session.report.tokens
        assert (tokens.prompt, tokens.reused, tokens.ran) == (second, rows, second - rows)
        changed = [*later[:-1], {"role": "tool", "tool_call_id": "c1", "content": "never"}]
        session.generate(messages=changed, tools=TOOLS, max_tokens=1)
        assert rows <= session.report.tokens.reused < second
        session.generate(messages=[{"role": "user", "content": "Else"}], max_tokens=1)
        assert session.report.tokens.reused < 30


HARMONY = Special(
    control=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"),
    template=GPT_OSS,
)
LOOKED = "I look. to=functions.time"
LOOK = f"<|channel|>analysis<|message|>{LOOKED}<|end|><|start|>assistant"
BODY = '<|message|>{"city": "Rome"}<|call|>'


@pytest.mark.parametrize("special", [HARMONY, Special(template=GPT_OSS)], ids=["tokens", "text"])
@pytest.mark.parametrize(("before", "answer", "thought", "said"), [
    (LOOK, f" to=functions.get_weather<|channel|>commentary json{BODY}", LOOKED, ""),
    (LOOK, f"<|channel|>commentary to=functions.get_weather <|constrain|>json{BODY}", LOOKED, ""),
    ("", f" to=functions.get_weather<|channel|>commentary json{BODY}", "", ""),
    (LOOK, "<|channel|>final<|message|>{{Sunny}} to=functions.", LOOKED, "{{Sunny}} to=functions."),
    (f"{LOOK}<|channel|>commentary<|message|>Wait.<|end|><|start|>assistant", f" to=functions.get_weather json{BODY}",
     f"{LOOKED}Wait.", ""),
], ids=["recipient-first", "channel-first", "no-thought", "text", "preamble"])  # fmt: skip
def test_harmony_headers_choose_thought_call_or_text(
    tmp_path: Path, special: Special, before: str, answer: str, thought: str, said: str
) -> None:
    """gpt-oss's: the header of a part says whether it is a thought, a call or text."""
    model = opened(special)
    start = model.chat_prompt(MESSAGES, tools=TOOLS).first(None).size
    script = model.tokenizer.encode((before + answer).removesuffix("<|call|>"), special=True).tolist()
    path = write_script(tmp_path / "m.gguf", special, start, script, CONTEXT)
    with load(path, backend="reference", max_kv_size=CONTEXT) as session:
        events, thoughts = list[Any](), list[str]()
        text = session.generate(messages=MESSAGES, tools=TOOLS, max_tokens=len(script), on_call=events.append,
                                on_thought=thoughts.append)  # fmt: skip
        report = session.report
    told = "".join(thoughts)
    assert (told if special.control else told.replace("<|end|>", "")) == thought  # which is no token there
    assert text == said
    calls = [(call.name, json.loads(call.arguments)) for call in report.tool_calls]
    assert calls == ([] if said else [("get_weather", {"city": "Rome"})])
    if calls:
        assert [type(each) for each in (events[0], events[-1])] == [CallBegin, CallEnd]


def test_conversations_take_and_save_results(speaks: Speak, tmp_path: Path) -> None:
    """Answers go on with results; calls are saved and loaded, and a turn is taken back with its calls."""
    later = with_result("One moment.")
    first, second = size(MESSAGES), size(later)
    with speaks((first, f"One moment.\n{CALL}<|im_end|>"), (second, "No rain.<|im_end|>")) as session:
        talk = Conversation(session, tools=TOOLS)
        with pytest.raises(InputError, match="0 calls wait for results, and 1 were given"):
            list(talk.give(["x"]))
        assert "".join(talk.say("Rain in Rome?", max_tokens=300)) == "One moment."
        [found] = talk.calls
        assert (found.name, found.arguments) == ("get_weather", '{"city": "Rome"}')
        with pytest.raises(InputError, match="get_weather was called, and has no result yet"):
            list(talk.say("Well?"))
        other = Conversation(session)
        for path in (tmp_path / "waits.json", tmp_path / "whole.json"):
            talk.save(path)
            other.load(path)
            assert other.messages == talk.messages
            assert other.calls == talk.calls
            if talk.calls:
                rows = session.engine.kv.length
                assert "".join(talk.give(["none"], max_tokens=300)) == "No rain."
                assert session.report.tokens.reused == rows
        assert talk.messages[1:] == [
            {**later[1], "tool_calls": [{**LOOKED_UP, "id": found.id}]},
            {**later[2], "tool_call_id": found.id},
            {"role": "assistant", "content": "No rain."},
        ]
        assert not talk.calls
        assert talk.undo() == "Rain in Rome?"
        assert talk.messages == []


def test_chat_shows_calls_and_takes_their_results(tmp_path: Path) -> None:
    later = with_result("One moment.")
    answers = (size(MESSAGES), f"One moment.\n{CALL}<|im_end|>"), (size(later), "No rain.<|im_end|>")
    path = write_answers(tmp_path / "script.gguf", *answers)
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps(TOOLS))
    flags = ("chat", str(path), "--backend", "reference", "--max-kv-size", str(CONTEXT), "-n", "300")
    for given, commands in ((("--tools", str(tools)), ""), ((), f"/tools {tools}\n")):
        done = edge(*flags, *given, stdin=f"{commands}Rain in Rome?\nnone\n/tools\n")
        assert done.returncode == 0, done.stderr
        assert done.stdout == "One moment.\nNo rain.\n"
        assert 'get_weather {"city": "Rome"}\n(a call: type its result, or /undo)' in done.stderr
        assert "(tools: get_weather, time)" in done.stderr
    tools.write_text('[{"type": "function"}]')
    done = edge(*flags, "--tools", str(tools))
    assert done.returncode == 2
    assert "tool 1: the name of a function has letters" in done.stderr
