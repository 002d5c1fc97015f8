"""Calls of tools in apps: the C runtime finds the calls and the text of edge.tools.parser, however text is cut."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Sequence
from ctypes import byref, c_int32, c_size_t
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from conftest import exhaustive
from ctypes_bundle import _Error
from runtime_library import load_runtime
from test_tool_parser import CASES, FORMS, KNOWN, LOOKALIKES

from edge.tools.formats import FORMATS, ToolFormat
from edge.tools.parser import ArgumentPiece, CallBegin, CallCut, CallEnd, TextPiece, ToolParser

BODIES = ("json", "tags", "call", "python", "named", "header")
Found = tuple[str, list[tuple[str, Any]], bool]
MERGED = {"type": "function", "function": {"name": "merged", "parameters": {
    "$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"type": "string"}, "y": {"type": "string"}}}},
    "anyOf": [{"properties": {"x": {"type": "string"}}},
              {"properties": {"z": {"type": "string"}, "w": {}}}]}}}  # fmt: skip
TOOLS = [*KNOWN, MERGED, {"type": "function", "name": "flat"}]
MORE = {
    "a name that is cut": ("hermes", '<tool_call>{"name": "time"}</tool_list> <tool_call>{"name": "fat"'),
    "a number that ends nothing": ("hermes", '<tool_call>{"name": "time", "arguments": {"zone": 1é}}</tool_call> x'),
    "escapes of names": ("hermes", '<tool_call>{"n\\u0061me": "ti\\u006de", "arguments": {}}</tool_call>'),
    "arguments first": ("hermes", '<tool_call>{"arguments": "{\\"zone\\": 1}", "name": "time"}</tool_call>'),
    "arguments that are a list": ("hermes", '<tool_call>{"arguments": [1], "name": "time"}</tool_call>'),
    "a call in text": ("hermes", 'I {"name": "time"} and <tool_call>{"name": "time"}</tool_call>; {"name": "flat"}'),
    "a closing mark of another": ("hermes", '<tool_call>{"name": "time"}</tool_list> <tool_call>{"name": "flat"}'),
    "a malformed call, then another": ("hermes", '<tool_call>{"name":"time","arguments":{"a" 1}}</tool_call>é'
                                       '<tool_call>{"name": "flat"}</tool_call>'),
    "merged schemas": ("qwen-tags", "<function=merged>\n<parameter=x>\n1\n</parameter>\n<parameter=y>1</parameter>"
                       "<parameter=z>\n\n2\n\n</parameter><parameter=w>\n [1] \n</parameter></function>"),
    "no JSON in a tag": ("qwen-tags", '<function=write><parameter=size>\n"a\nb"\n</parameter><parameter=deep>[1,]'
                         "</parameter><parameter=any>\u2003None\u00a0</parameter><parameter=size>1e5 </parameter>"
                         "</function>"),
    "Python's escapes": ("lfm2", "<|tool_call_start|>[flat(a='\\x41\\u00e9\\U0001F600\\q\\x4 \\ud800', b=\"it's\", "
                         "c=a b)]<|tool_call_end|>"),
    "nested marks of texts": ("gemma4", '<|tool_call>call:flat{<|"|>a<|"|>:"b",c:[(<|"|>x\n"<|"|>),],d:{},}'
                              "<tool_call|>"),
}  # fmt: skip


@lru_cache
def runtime() -> ctypes.CDLL:
    names = ("calls.c", "call_forms.c", "call_literals.c", "call_values.c", "tool_list.c")
    library = load_runtime(*names, "json.c", Path(__file__).parents[1] / "runtime/tools_harness.c", "utf8.c", "error.c")
    library.harness_text.restype, library.harness_call.restype = c_size_t, ctypes.c_char_p
    data = json.dumps(TOOLS).encode()
    assert c_int32(library.harness_tools(data, c_size_t(len(data)), byref(_Error()))).value == 0
    return library


def found_in_c(form: ToolFormat, pieces: Sequence[str | bytes], *, cut: bool = False) -> Found:
    library, room, said = runtime(), ctypes.create_string_buffer(1 << 18), b""
    also = form.also[0] if form.also else ""
    texts = [form.opening, form.closing, also, form.quote, form.arguments, form.between]
    kept = [each.encode() for each in texts]
    library.harness_begin(BODIES.index(form.body), form.bare, form.joined, (ctypes.c_char_p * 6)(*kept))
    for piece in (*pieces, None):
        if piece is None:
            library.harness_finish(int(cut))
        else:
            data = piece.encode() if isinstance(piece, str) else piece
            library.harness_feed(data, c_size_t(len(data)))
        size = library.harness_text(room, c_size_t(1 << 18))
        said += ctypes.string_at(room, size)
    calls = []
    for index in range(library.harness_count()):
        arguments = library.harness_call(index, room)
        calls.append((room.value.decode(), json.loads(arguments)))
    return said.decode(errors="replace"), calls, bool(library.harness_cut())


def found_in_python(form: ToolFormat, text: str, *, cut: bool = False) -> Found:
    numbers = count()
    parser = ToolParser(form, TOOLS, lambda: f"call_{next(numbers)}")
    said, calls, was_cut, name, arguments = "", [], False, "", ""
    for event in [*parser.feed(text), *parser.finish(cut=cut)]:
        if isinstance(event, TextPiece):
            said += event.text
        elif isinstance(event, CallBegin):
            name, arguments = event.name, ""
        elif isinstance(event, ArgumentPiece):
            arguments += event.text
        elif isinstance(event, CallEnd):
            calls.append((name, json.loads(arguments)))
        else:
            assert isinstance(event, CallCut)
            was_cut = True
    return said, calls, was_cut


TEXTS = [*((form, text) for form, text, _, _ in CASES.values()), *MORE.values()]


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_calls_are_those_of_python(name: str, text: str) -> None:
    """Whole, and cut anywhere into pieces of bytes; and so are all their beginnings."""
    form, chance, data = FORMS[name], random.Random(text), text.encode()
    expected = found_in_python(form, text)
    assert found_in_c(form, [text]) == expected
    for _ in range(8):
        cuts = sorted(chance.choices(range(len(data) + 1), k=chance.randint(1, 12)))
        pieces = [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert found_in_c(form, pieces) == expected
    for end in chance.sample(range(len(text) + 1), min(len(text) + 1, 24)):
        for cut in (False, True):
            assert found_in_c(form, [text[:end]], cut=cut) == found_in_python(form, text[:end], cut=cut), (end, cut)


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_text_that_resembles_calls_stays_text(form: ToolFormat) -> None:
    for text in LOOKALIKES:
        assert found_in_c(form, [*text]) == (text, [], False)


def changed(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        new = "".join(chance.choices("<>{}[]()=\"',:|/\\ \nabt;é0", k=chance.randint(0, 2)))
        text = text[:at] + new + text[at + chance.randint(0, 3) :]
    return text


@pytest.mark.parametrize("seed", [0, *(exhaustive(each) for each in range(1, 9))])
def test_damaged_calls_are_read_alike(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(500 if not seed else 20_000):
        name, text = chance.choice(TEXTS)
        text, form = changed(text, chance), FORMS[name] if chance.random() < 0.8 else chance.choice(FORMATS)
        cut = chance.random() < 0.3
        middle = chance.randrange(len(text) + 1)
        assert found_in_c(form, [text[:middle], text[middle:]], cut=cut) == found_in_python(form, text, cut=cut), (
            form.name,
            text,
            cut,
        )


def test_calls_that_were_none_leave_room_for_others() -> None:
    none = '<tool_call>{"arguments": {"a": "' + 50_000 * "b" + '"}, "name": "fat"}'
    text = 3 * none + '<tool_call>{"name": "time", "arguments": {"zone": 1}}</tool_call>'
    _, calls, _ = found_in_c(FORMS["hermes"], [text[at : at + 999] for at in range(0, len(text), 999)])
    assert calls == [("time", {"zone": 1})]


def test_a_call_without_end_is_cut() -> None:
    """However long it is: the text of one call, its arguments and its blanks are bounded."""
    for text in (
        '<tool_call>{"name": "time", "arguments": {"a": "' + 70_000 * "b",
        "<tool_call>" + 70_000 * " ",
        3000 * "<tool_call>{",
    ):
        said, calls, _ = found_in_c(FORMS["hermes"], [text[at : at + 999] for at in range(0, len(text), 999)])
        assert not calls
        assert len(said) <= len(text)
