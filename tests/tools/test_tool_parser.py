"""Calls in generated text: each family's form, whichever way the text is split, cut, or malformed."""

# ruff: noqa: E501
from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from conftest import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_templates import GEMMA4, GPT_OSS, LFM2, LLAMA32, MISTRAL, QWEN3, QWEN35, SMOLLM3, TOOLS

from edge.tools.formats import FORMATS, HERMES, ToolFormat, find_format
from edge.tools.parser import ArgumentPiece, CallBegin, CallCut, CallEnd, Event, TextPiece, ToolParser, merged

FORMS = {form.name: form for form in reversed(FORMATS)}
Calls = list[tuple[str, Any]]
PATH = {"type": "function", "function": {"name": "write", "parameters": {"properties": {
    "path": {"type": "string"}, "size": {"type": "integer"}, "deep": {"type": "object"}, "any": {},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}  # fmt: skip
KNOWN = [*TOOLS, PATH]


def parsed(form: ToolFormat, pieces: Sequence[str], tools: Any = KNOWN) -> list[Event]:
    numbers = count()
    parser = ToolParser(form, tools, lambda: f"call_{next(numbers)}")
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return merged(events)


def read(events: Sequence[Event]) -> tuple[str, Calls, bool]:
    """The text, complete calls, and whether one was cut. Checks the order of events."""
    text, calls, cut, begun = "", list[tuple[str, Any]](), False, -1
    arguments = ""
    for event in events:
        if isinstance(event, TextPiece):
            text += event.text
            assert event.text
        elif isinstance(event, CallBegin):
            begun += 1
            assert (event.index, event.id) == (begun, f"call_{begun}")
            name, arguments = event.name, ""
        else:
            assert event.index == begun
            if isinstance(event, ArgumentPiece):
                arguments += event.text
            elif isinstance(event, CallEnd):
                value = json.loads(arguments)
                assert isinstance(value, dict)
                calls.append((name, value))
            else:
                cut = True
    return text, calls, cut


HERMES_CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Z\\u00fcrich \\"ZH\\"", "days": 2}}\n</tool_call>'
)
ROME = ("get_weather", {"city": 'Zürich "ZH"', "days": 2})
TIME = ("time", {"zone": "CET"})
CASES: dict[str, tuple[str, str, str, Calls]] = {
    "hermes": ("hermes", HERMES_CALL, "", [ROME]),
    "hermes, text and two calls": (
        "hermes",
        f'Let me look.\n{HERMES_CALL}\n<tool_call>\n{{"name":"time","arguments":{{"zone":"CET"}}}}\n</tool_call>',
        "Let me look.",
        [ROME, TIME],
    ),
    "hermes, text behind": ("hermes", f"{HERMES_CALL}\nDone.\n", "Done.\n", [ROME]),
    "hermes, no tags": ("hermes", HERMES_CALL[12:-13], "", [ROME]),
    "hermes, list": ("hermes", '<tool_call>[{"name":"time"},{"arguments":{},"name":"time"}]</tool_call>', "",
                     [("time", {}), ("time", {})]),
    "hermes, text in JSON": ("hermes", '<tool_call>{"name":"time","arguments":"{\\"zone\\": \\"CET\\"}"}</tool_call>',
                             "", [TIME]),
    "hermes, line break in a text": ("hermes", '<tool_call>{"name":"time","arguments":{"zone":"C\nET"}}</tool_call>',
                                     "", [("time", {"zone": "C\nET"})]),
    "hermes, no closing tag": ("hermes", HERMES_CALL[:-13], "", [ROME]),
    "hermes, nested marks": ("hermes", '<tool_call>{"name":"time","arguments":{"zone":"</tool_call>"}}</tool_call>',
                             "", [("time", {"zone": "</tool_call>"})]),
    "qwen-tags": (
        "qwen-tags",
        'I look.\n\n<tool_call>\n<function=write>\n<parameter=path>\na\n"b" <x>\n</parameter>\n<parameter=size>\n12\n'
        '</parameter>\n<parameter=deep>\n{"a": [true]}\n</parameter>\n<parameter=maybe>\nnull\n</parameter>\n'
        "</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
        "I look.",
        [("write", {"path": 'a\n"b" <x>', "size": 12, "deep": {"a": [True]}, "maybe": None}), ("time", {})],
    ),
    "qwen-tags, no opening": ("qwen-tags", "<function=time>\n<parameter=zone>\nCET\n</parameter>\n</function>", "",
                              [TIME]),
    "qwen-tags, JSON": ("qwen-tags", HERMES_CALL, "", [ROME]),
    "qwen-tags, no JSON": (
        "qwen-tags",
        "<tool_call>\n<function=write>\n<parameter=size>\ntwelve\n</parameter>\n<parameter=any>\n5\n</parameter>\n"
        "<parameter=maybe>\nTrue\n</parameter>\n</function>\n</tool_call>",
        "",
        [("write", {"size": "twelve", "any": "5", "maybe": True})],
    ),
    "gemma4": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Zürich "ZH"<|"|>,days:2}<tool_call|><|tool_call>call:time{zone:<|"|>CET'
        '<|"|>}<tool_call|>',
        "",
        [ROME, TIME],
    ),
    "gemma4, nested": (
        "gemma4",
        'Ok. <|tool_call>call:write{deep:{a:[true,null,-1.5e3],<|"|>b c<|"|>:{}},any:[],path:<|"|>{,}<|"|>}<tool_call|>',
        "Ok.",
        [("write", {"deep": {"a": [True, None, -1500.0], "b c": {}}, "any": [], "path": "{,}"})],
    ),
    "functiongemma": ("functiongemma", "<start_function_call>call:time{zone:<escape>CET<escape>}<end_function_call>",
                      "", [TIME]),
    "lfm2": (
        "lfm2",
        '<|tool_call_start|>[get_weather(city=\'Zürich "ZH"\', days=2), time(zone="CET")]<|tool_call_end|>Checking.',
        "Checking.",
        [ROME, TIME],
    ),
    "lfm2, values": (
        "lfm2",
        "<|tool_call_start|>[write(path='it\\'s Bob's\\n\\u00e9', deep={\"a\": (1, True), 'b': None}, any=[], size=-3)]"
        "<|tool_call_end|>",
        "",
        [("write", {"path": "it's Bob's\né", "deep": {"a": [1, True], "b": None}, "any": [], "size": -3})],
    ),
    "lfm2, one without a list": ("lfm2", "<|tool_call_start|>time()<|tool_call_end|>", "", [("time", {})]),
    "lfm2, JSON": ("lfm2", '<|tool_call_start|>{"name":"time","arguments":{}}<|tool_call_end|>', "", [("time", {})]),
    "llama3": ("llama3", '{"name": "time", "parameters": {"zone": "CET"}}', "", [TIME]),
    "llama3, two": (
        "llama3",
        '<|python_tag|>{"name": "time", "parameters": {}}; {"type": "function", "function": "time", "parameters": null}',
        "",
        [("time", {}), ("time", {})],
    ),
    "llama3, python": ("llama3", "[time(zone='CET')]", "", [TIME]),
    "mistral": ("mistral", '[TOOL_CALLS]time[ARGS]{"zone": "CET"}[TOOL_CALLS]time[CALL_ID]x[ARGS]{}', "",
                [TIME, ("time", {})]),
    "harmony": ("harmony", ' to=functions.time<|channel|>commentary json<|message|>{"zone": "CET"}', "", [TIME]),
    "harmony, constrained": ("harmony", ' to=functions.time <|constrain|>json<|message|>{"zone":"CET"}', "", [TIME]),
    "mistral-list": ("mistral-list", '[TOOL_CALLS] [{"name": "time", "arguments": {}, "id": "abcdefghi"}]', "",
                     [("time", {})]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_calls_are_found(case: str) -> None:
    form, text, said, calls = CASES[case]
    assert read(parsed(FORMS[form], [text])) == (said, calls, False)


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_pieces_change_no_events(case: str, data: st.DataObject) -> None:
    form, text, _, _ = CASES[case]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=20)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(FORMS[form], [text])
    assert parsed(FORMS[form], pieces) == parsed(FORMS[form], [*text]) == whole


@pytest.mark.parametrize("case", CASES)
def test_call_that_is_cut_is_never_complete(case: str) -> None:
    form, text, _, calls = CASES[case]
    seen = set()
    for end in range(len(text)):
        _, found, cut = read(parsed(FORMS[form], [text[:end]]))
        assert found == calls[: len(found)]
        seen.add(cut)
    assert seen == {True, False}


LOOKALIKES = [
    "I would write <tool_call> to call.", "<tool_call>\nnot JSON\n</tool_call>",
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', '{"name": "John", "age": 5}', '{"time": 5}',
    "[1, 2, 3]", "[]", "<|tool_call_start|>[]<|tool_call_end|>", "<tool_call>[ ]</tool_call>", "a < b and <tool_cal",
    "<|tool_call>call me<tool_call|>", "[TOOL_CALLS] are fun",
    "header to=functions.time<|channel|>commentary json<|message|>[]", " to=functions.unknown<|message|>{}",
    "[time] is [unknown(a=1)]", "  \n", "",
]  # fmt: skip


@pytest.mark.parametrize("text", LOOKALIKES)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_lookalikes_stay_text(form: ToolFormat, text: str) -> None:
    assert read(parsed(form, [*text])) == (text, [], False)


def test_arguments_come_as_soon_as_they_are_sure() -> None:
    parser = ToolParser(HERMES, KNOWN)
    assert parser.feed('<tool_call>{"name": "time", "argum') == []
    begin, first = parser.feed('ents": {"zone": "C')
    assert begin.id.startswith("call_")
    assert first == ArgumentPiece(0, '{"zone": "C')
    assert parser.feed("E") == [ArgumentPiece(0, "E")]
    assert parser.finish() == [CallCut(0)]


@pytest.mark.parametrize(("name", "text", "whole"), [
    ("hermes", HERMES_CALL[:-13], True), ("hermes", HERMES_CALL[:-14], False), ("hermes", HERMES_CALL[:-3], True),
    ("hermes", f"{HERMES_CALL}\n<tool_call>", False), ("hermes", f"{HERMES_CALL} Done", False),
    ("lfm2", '<|tool_call_start|>[time(zone="CET")', True), ("lfm2", '<|tool_call_start|>[time(zone="CET"), t', False),
])  # fmt: skip
def test_whole_calls_may_lack_their_closing(name: str, text: str, whole: bool) -> None:
    parser = ToolParser(FORMS[name], KNOWN)
    parser.feed(text)
    parser.finish(cut=True)
    assert parser.whole is whole


def test_families_are_found_by_their_templates() -> None:
    found = {
        "hermes": [QWEN3, SMOLLM3, "no tools", None], "qwen-tags": [QWEN35], "gemma4": [GEMMA4], "lfm2": [LFM2],
        "llama3": [LLAMA32], "mistral": [MISTRAL], "harmony": [GPT_OSS],
    }  # fmt: skip
    assert {name: [find_format(each).name for each in sources] for name, sources in found.items()} == {
        name: [name] * len(sources) for name, sources in found.items()
    }
