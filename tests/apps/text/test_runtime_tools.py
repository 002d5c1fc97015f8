"""Tools in apps: the C runtime finds the calls and the text of edge.tools.parser, however text is cut, and writes tools
and results as the model's chat template does."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Sequence
from contextlib import suppress
from ctypes import byref, c_int32, c_size_t
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples
from ctypes_bundle import ERRORS, _Error
from runtime_library import load_runtime, pointer
from runtime_tokens import CTokenizer, aligned
from small_models import Small, Special, write_small
from test_chat import CHATML
from test_tool_grammar import MODELS
from test_tool_parser import CASES, FORMS, KNOWN, LOOKALIKES
from tool_templates import SMOLLM3, TOOLS, call

from edge.apps.sections.chat import exported_think
from edge.apps.sections.tools_file import PARTS, tools_section
from edge.errors import EngineError, ModelFormatError, UnsupportedError
from edge.model.model import Model, open_model
from edge.tools.formats import FORMATS, ToolFormat
from edge.tools.parser import ArgumentPiece, CallBegin, CallCut, CallEnd, TextPiece, ToolParser

BODIES = ("json", "tags", "call", "python", "named", "header")
Found = tuple[str, list[tuple[str, Any]], bool, bool]
MERGED = {"type": "function", "function": {"name": "merged", "parameters": {
    "$ref": "#/$defs/a", "$defs": {"a": {"properties": {"x": {"type": "string"}, "y": {"type": "string"}}}},
    "anyOf": [{"properties": {"x": {"type": "string"}}},
              {"properties": {"z": {"type": "string"}, "w": {}}}]}}}  # fmt: skip
CALLED = [*KNOWN, MERGED, {"type": "function", "name": "flat"}]
MORE_CASES = {
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
    library = load_runtime(*names, "json.c", "tools_harness.c", "utf8.c", "error.c")
    library.harness_text.restype, library.harness_call.restype = c_size_t, ctypes.c_char_p
    data = json.dumps(CALLED).encode()
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
    return said.decode(errors="replace"), calls, bool(library.harness_cut()), bool(library.harness_whole())


def found_in_python(form: ToolFormat, text: str, *, cut: bool = False) -> Found:
    numbers = count()
    parser = ToolParser(form, CALLED, lambda: f"call_{next(numbers)}")
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
    return said, calls, was_cut, parser.whole


TEXTS = [*((form, text) for form, text, _, _ in CASES.values()), *MORE_CASES.values()]


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
        assert found_in_c(form, [*text]) == (text, [], False, False)


def changed(text: str, chance: random.Random) -> str:
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(text) + 1)
        new = "".join(chance.choices("<>{}[]()=\"',:|/\\ \nabt;é0", k=chance.randint(0, 2)))
        text = text[:at] + new + text[at + chance.randint(0, 3) :]
    return text


def test_damaged_calls_are_read_alike() -> None:
    chance = random.Random(0)
    for _ in range(examples(500)):
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
    _, calls, *_ = found_in_c(FORMS["hermes"], [text[at : at + 999] for at in range(0, len(text), 999)])
    assert calls == [("time", {"zone": 1})]


def test_a_call_without_end_is_cut() -> None:
    """However long it is: the text of one call, its arguments and its blanks are bounded."""
    for text in (
        '<tool_call>{"name": "time", "arguments": {"a": "' + 70_000 * "b",
        "<tool_call>" + 70_000 * " ",
        3000 * "<tool_call>{",
    ):
        said, calls, *_ = found_in_c(FORMS["hermes"], [text[at : at + 999] for at in range(0, len(text), 999)])
        assert not calls
        assert len(said) <= len(text)


# Prompts

MORE: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {"name": "a.b", "description": "\"'é\n\\ \t\x01 <|im_end|> \U0001f600", "strict": True},
    },
    {
        "name": "flat",
        "parameters": {"required": [], "type": "object", "properties": {"x": {"enum": [1, 2.5, None, {}, [], [True]]}}},
    },
    {"type": "function", "function": {"parameters": {"additionalProperties": {"type": "integer"}}, "name": "open"}},
]
LISTS = {"two": TOOLS, "one": TOOLS[:1], "others": MORE}
TEMPLATES = {
    name: special for name, special in MODELS.items() if name not in ("gemma4", "gemma4, marks in text", "harmony")
}
TEMPLATES |= {"smollm3": Special(template=SMOLLM3, control=("<|im_start|>", "<|im_end|>"))}
TEMPLATES |= {"plain": Special(template=CHATML, control=("<|im_start|>", "<|im_end|>"))}
SYSTEM, USER, RESULT = 'Be "brief".', "Weather?", '{"é": "18 °C\n"}'


class Prompts:
    """A model's tokenizer and section TOOLS in C."""

    def __init__(self, model: Model) -> None:
        more = ("prompt_harness.c", "tool_prompt.c", "tools_describe.c", "tool_list.c", "json.c")
        self._tokenizer, self.section = CTokenizer(model.tokenizer, more=more), tools_section(model)
        self._tokenizer.library.prompt_part.restype = ctypes.c_int64

    def part(self, part: str, tools: Any, *texts: str, section: bytes | None = None) -> list[int]:
        """texts: system, result, name, identifier."""
        data = aligned(self.section if section is None else section)
        given = [each.encode() for each in (*texts, "", "", "", "")[:4]]
        ids, error = np.zeros(1 << 15, np.int32), _Error()
        count = self._tokenizer.library.prompt_part(
            self._tokenizer.handle, pointer(data), ctypes.c_uint64(data.size), json.dumps(tools).encode(),
            PARTS.index(part), (ctypes.c_char_p * 4)(*given), pointer(ids), ctypes.c_int64(ids.size), byref(error),
        )  # fmt: skip
        if count < 0:
            raise ERRORS.get(count, EngineError)(error.message.decode())
        return ids[:count].tolist()


def opened(tmp_path: Path, special: Special) -> Model:
    return open_model(write_small(tmp_path / "m.gguf", Small(context=4096, vocab=280), special=special))


def prompt_of(model: Model, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    assert model.template is not None
    ids: list[int] = model.chat_prompt(messages, tools=tools, think=exported_think(model.template)).first(None).tolist()
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_are_those_of_the_template(tmp_path: Path, name: str) -> None:
    model = opened(tmp_path, TEMPLATES[name])
    c, user = Prompts(model), {"role": "user", "content": USER}
    said = model.tokenizer.encode(USER, start=False).tolist()
    for tools in LISTS.values():
        opening, bos = c.part("opening", tools), [model.tokenizer.bos_id] if model.tokenizer.add_bos else []
        for part, system in (("first", []), ("system", [{"role": "system", "content": SYSTEM}])):
            ids = c.part(part, tools, SYSTEM)
            ids = ids if ids[:1] == bos else bos + ids
            assert ids + said + opening == prompt_of(model, [*system, user], tools)


@pytest.mark.parametrize("name", TEMPLATES)
def test_results_are_those_of_the_template(tmp_path: Path, name: str) -> None:
    """Results stand behind one call or, if the template writes several, two; some are only blanks."""
    model = opened(tmp_path, TEMPLATES[name])
    c, tools, names = Prompts(model), LISTS["two"], ("get_weather", "time")
    user = {"role": "user", "content": USER}
    single = c.part("more", tools, "", RESULT) == []
    for at_once in (1,) if single else (1, 2):
        for result in (RESULT, "", " \n", " x "):
            calls = [call(each, '{"zone": "x"}', f"call0000{at}") for at, each in enumerate(names[:at_once], 1)]
            results = [{"role": "tool", "tool_call_id": each["id"], "content": result} for each in calls]
            messages = [user, {"role": "assistant", "content": "", "tool_calls": calls}, *results]
            expected, ids = prompt_of(model, messages, tools), []
            for at, each in enumerate(calls):
                ids += c.part("more" if at else "result", tools, "", result, each["function"]["name"], each["id"])
            ids += c.part("answer", tools)
            assert ids == expected[-len(ids) :]
            assert model.tokenizer.decode(expected[: -len(ids)]).endswith(
                ("</tool_call>", "}", "]", ")]", "</function>\n")
            )
    if name != "plain":
        return
    exchange = [user, {"role": "assistant", "content": "Hm."}, {"role": "user", "content": "So?"}]
    tail = c.part("next", tools) + model.tokenizer.encode("So?", start=False).tolist() + c.part("opening", tools)
    assert tail == prompt_of(model, exchange, tools)[-len(tail) :]


@pytest.mark.parametrize("name", ["gemma4", "harmony"])
def test_templates_with_other_notations_are_refused(tmp_path: Path, name: str) -> None:
    model = opened(tmp_path, MODELS[name])
    with pytest.raises(UnsupportedError, match="a notation of its own, which apps lack"):
        Prompts(model).part("first", TOOLS)


def test_damaged_sections_raise_one_error(tmp_path: Path) -> None:
    c, chance = Prompts(opened(tmp_path, MODELS["hermes"])), random.Random(5)
    for _ in range(400):
        section = bytearray(c.section)
        for _ in range(chance.randint(1, 4)):
            section[chance.randrange(len(section) if chance.random() < 0.2 else 200)] = chance.choice(
                (0, 1, 3, 127, 255)
            )
        with suppress(ModelFormatError):
            c.part(chance.choice(PARTS), TOOLS, SYSTEM, RESULT, section=bytes(section[: chance.choice((2000, 150))]))
    with pytest.raises(ModelFormatError, match=r"^model.edge is damaged \(its tools\): export it again$"):
        c.part("first", TOOLS, section=c.section[:-1])
