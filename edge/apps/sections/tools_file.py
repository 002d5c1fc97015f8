"""Section TOOLS of model.edge: how the chat template writes tools, and results of calls (runtime/tools/tool_prompt.c).

The template is rendered with tools, calls and results that stand for any others. Where it writes tools as JSON, or as
Python writes dicts, apps may state any tools when they run; templates with a notation of their own are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import product
from typing import Any

import numpy as np

from edge.apps.c_struct import c_struct, filled
from edge.apps.sections.chat import exported_think
from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.model.chat.chat_template import ChatTemplate
from edge.model.chat.parts import Segment
from edge.model.chat.thinking import Think
from edge.model.model import Model
from edge.records import dataclass
from edge.run.sampling.tool_calls import special_marks
from edge.tools.formats import ToolFormat
from edge.tools.parser import CallEnd, ToolParser
from edge.tools.use import ToolUse

BODIES = ("json", "tags", "call", "python", "named", "header")  # in the order of CALL_JSON …
TEXTS = (
    "opening",
    "closing",
    "also",
    "quote",
    "arguments",
    "between",
    "separator",
)  # in the order of TOOL_TEXT_OPENING …
# first, system: up to the first text of the user, without and with a system prompt. opening: from there to the answer.
# next: from an answer to the next text of the user. result: from calls to the first result, more: to the next one,
# answer: from the last to the answer.
PARTS = ("first", "system", "opening", "next", "result", "more", "answer")
ITEMS = ("text", "tools", "system", "result", "name", "id")  # in the order of TOOL_ITEM_TEXT …
WRITTEN = ("as is", "json", "ascii", "repr")  # how a text stands in the template's, in the order of WRITTEN_AS_IS …
FLAGS = ("BARE", "JOINED", "WHOLE", "REPR", "ASCII", "COMPACT", "SINGLE")
BARE, JOINED, WHOLE, REPR, ASCII, COMPACT, SINGLE = (1 << bit for bit in range(len(FLAGS)))
# whole: tools with their type, rather than functions alone. single: the template writes one call an answer.
HEADER = c_struct(
    body="<u4", flags="<u4", indent="<u4", marks="<u4", texts=("<u4", (len(TEXTS),)), items=("<u4", (len(PARTS),)),
)  # fmt: skip
MARK = c_struct(token="<i4", length="<u4")
ITEM = c_struct(kind="<u2", written="<u2", trims="<u4", length="<u4")
STRUCTS = {"tools_config": HEADER, "tool_mark": MARK, "tool_item": ITEM}

Tool = dict[str, Any]


def _tool(name: str, **function: Any) -> Tool:
    return {"type": "function", "function": {"name": name, **function}}


_QUOTED = 'say "é\'s"\n'
_INNER = {
    "type": "object",
    "properties": {"deep": {"type": "array", "items": {"type": "string"}}},
    "required": ["deep"],
}
_TOOLS = (
    _tool("probe_one", description=_QUOTED, parameters={
        "type": "object", "required": ["city"], "additionalProperties": False, "properties": {
            "city": {"type": "string", "description": "Its name", "enum": ["a", "b"]},
            "days": {"type": "integer", "minimum": 0, "default": 1.5}, "Inner": _INNER,
            "any": {"anyOf": [{"type": "null"}, {"const": True}], "examples": [[], {}]}}}),
    _tool("probe_two", description="Two", parameters={"type": "object", "properties": {}}),
    _tool("probe_three", description="", strict=True, parameters={
        "type": "object", "properties": {"x": {"type": "number"}}}),
)  # fmt: skip
_USER, _AGAIN, _SYSTEM, _REPLY = "the user's text", "the next text", "the system's text", "the reply"
_RESULTS = ('  first "é\'s"\n ', '  second "é\'s"\n ')
_IDS = ("callprob1", "callprob2")


@dataclass(frozen=True)
class Style:
    """How a template writes a tool."""

    whole: bool
    repr: bool = False
    indent: int | None = None
    ascii: bool = False
    compact: bool = False

    def write(self, tool: Tool) -> str:
        value = tool if self.whole else tool["function"]
        separators = (",", ":") if self.compact else None
        return str(value) if self.repr else json.dumps(
            value, ensure_ascii=self.ascii, indent=self.indent, separators=separators
        )  # fmt: skip

    @property
    def flags(self) -> int:
        return WHOLE * self.whole | REPR * self.repr | ASCII * self.ascii | COMPACT * self.compact


_STYLES = [
    Style(whole, False, indent, ascii, compact)
    for whole, indent, ascii, compact in product((True, False), (None, 4, 2), (False, True), (False, True))
] + [Style(whole, repr=True) for whole in (True, False)]


@dataclass(frozen=True)
class Item:
    """A piece of a part: the template's own text, or the place of another text. text: the template's own; of a system
    prompt, the text that is encoded together with it. trims: without blanks at its ends."""

    kind: str
    text: str = ""
    written: str = "as is"
    trims: bool = False


def tools_section(model: Model) -> bytes:
    """The bytes of section TOOLS; empty without a template, or where apps cannot write it."""
    if model.template is None:
        return b""
    try:
        return _Probed(model, model.template).section()
    except (InputError, ModelFormatError, UnsupportedError):
        return b""


def calls_kind(section: bytes | None) -> str:
    """The `tools_kind` of runtime/tools/tools.c that a section TOOLS needs, as C."""
    if not section:
        return "NULL"
    body = BODIES[int.from_bytes(section[:4], "little")]
    return "&edge_json_calls" if body in ("json", "named", "header") else "&edge_calls_of_fields"


class _Probed:
    """A template, rendered with texts that stand for others. Raises UnsupportedError if it writes tools otherwise."""

    def __init__(self, model: Model, template: ChatTemplate) -> None:
        self._model, self._template, self._form = model, template, model.tool_format
        self._think: Think = exported_think(template)

    def section(self) -> bytes:
        first, opening = self._split([{"role": "user", "content": _USER}])
        style, separator, items = self._find_style(first)
        parts: dict[str, list[Item]] = {"first": items, "opening": _trusted(opening)}
        with suppress(InputError, UnsupportedError):
            messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
            system, after = self._split(messages)
            if after == opening:
                parts["system"] = self._holes(system, self._behind_system(messages), style, separator)
        with suppress(InputError, UnsupportedError):
            messages = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _REPLY},
                        {"role": "user", "content": _AGAIN}]  # fmt: skip
            text, after = self._split(messages, _AGAIN)
            between = text.rpartition(_REPLY)[2]
            if after == opening and text.count(_REPLY) == 1 and not any(_name(each) in between for each in _TOOLS):
                parts["next"] = _trusted(between)
        single = self._results(parts)
        return self._written(style, separator, parts, single)

    def _segments(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = _TOOLS) -> list[Segment]:
        return self._template.conversation(messages, [*tools], self._think)[0]

    def _text(self, messages: list[dict[str, Any]], tools: Sequence[Tool] = _TOOLS) -> str:
        return "".join(str(each.text) for each in self._segments(messages, tools))

    def _behind_system(self, messages: list[dict[str, Any]]) -> str:
        """The text that is encoded together with a system prompt, behind it."""
        found = [str(each.text) for each in self._segments(messages) if _SYSTEM in str(each.text)]
        if len(found) != 1 or not found[0].startswith(_SYSTEM):
            raise UnsupportedError("the chat template repeats a text")
        return found[0].removeprefix(_SYSTEM)

    def _split(self, messages: list[dict[str, Any]], at: str = _USER) -> tuple[str, str]:
        """The text before a message, and behind it."""
        before, found, behind = self._text(messages).rpartition(at)
        if not found:
            raise UnsupportedError("the chat template drops a text")
        return before, behind

    def _find_style(self, text: str) -> tuple[Style, str, list[Item]]:
        """How the template writes tools, and between them, in a text with those of `_TOOLS`."""
        for style in _STYLES:
            before, found, rest = text.partition(style.write(_TOOLS[0]))
            separator, more, rest = rest.partition(style.write(_TOOLS[1]))
            other = separator + style.write(_TOOLS[2])
            if not (found and more and rest.startswith(other)):
                continue
            behind = rest[len(other) :]
            for count in (1, 2):
                tools = separator.join(map(style.write, _TOOLS[:count]))
                if (
                    self._text([{"role": "user", "content": _USER}], _TOOLS[:count]).partition(_USER)[0]
                    != before + tools + behind
                ):
                    break
            else:
                return style, separator, [*_trusted(before), Item("tools"), *_trusted(behind)]
        raise UnsupportedError("the chat template writes tools in a notation of its own")

    def _holes(self, text: str, behind: str, style: Style, separator: str) -> list[Item]:
        """The items of a text with all tools and a system prompt, with the text behind it."""
        kinds = {separator.join(map(style.write, _TOOLS)): Item("tools"), _SYSTEM + behind: Item("system", behind)}
        pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
        if sorted(piece for piece in pieces if piece in kinds) != sorted(kinds):
            raise UnsupportedError("the chat template repeats a text")
        return [item for piece in pieces for item in ([kinds[piece]] if piece in kinds else _trusted(piece))]

    def _results(self, parts: dict[str, list[Item]]) -> bool:
        """Add the parts around results. Returns whether the template writes one call an answer."""
        for count in (2, 1):
            with suppress(InputError, UnsupportedError):
                text = self._text(_called(count))
                start = self._end_of_calls(text, count)
                found = _pieces(text[start:], count)
                parts["result"], parts["answer"] = found[0], found[-1]
                if count == 2:
                    parts["more"] = found[1]
                return count == 1
        return False

    def _end_of_calls(self, text: str, count: int) -> int:
        """Where the last call ends in a rendered conversation."""
        form, at, calls = self._form, text.index(_USER) + len(_USER), 0
        opening = form.opening or "{"
        at = text.index(opening, at)
        parser = ToolParser(form, _TOOLS)
        for end in range(at, len(text)):
            calls += sum(isinstance(event, CallEnd) for event in parser.feed(text[end]))
            if calls == count:
                break
        else:
            raise UnsupportedError("the chat template writes calls in another form")
        ending = r"\s*\]" if form.joined else ""  # the parser has seen the character behind the call
        if form.closing:
            ending += rf"\s*{re.escape(form.closing)}"
        match = re.match(ending, text[end:])
        return end + (match.end() if match else 0)

    def _written(self, style: Style, separator: str, parts: dict[str, list[Item]], single: bool) -> bytes:
        form, tokenizer = self._form, self._model.tokenizer
        marks = special_marks(ToolUse(form, _TOOLS), tokenizer)
        texts = [*(each.encode() for each in _texts(form)), separator.encode()]
        items = [each for name in PARTS for each in parts.get(name, ())]
        flags = style.flags | BARE * form.bare | JOINED * form.joined | SINGLE * single
        header = {
            "body": BODIES.index(form.body), "flags": flags, "indent": style.indent or 0, "marks": len(marks),
            "texts": list(map(len, texts)), "items": [len(parts.get(name, ())) for name in PARTS],
        }  # fmt: skip
        rows = [
            (ITEMS.index(each.kind), WRITTEN.index(each.written), each.trims, len(each.text.encode())) for each in items
        ]
        return b"".join([
            filled(HEADER, header),
            np.array([(token, len(mark.encode())) for mark, token in marks.items()], MARK).tobytes(),
            np.array(rows, ITEM).tobytes(), *texts, *(mark.encode() for mark in marks),
            *(each.text.encode() for each in items),
        ])  # fmt: skip


def _name(tool: Tool) -> str:
    return str(tool["function"]["name"])


def _texts(form: ToolFormat) -> Iterable[str]:
    return form.opening, form.closing, form.also[0] if form.also else "", form.quote, form.arguments, form.between


def _trusted(text: str) -> list[Item]:
    return [Item("text", text)] if text else []


def _called(count: int) -> list[dict[str, Any]]:
    """A conversation with calls and their results."""
    calls = [
        {"id": identifier, "type": "function", "function": {"name": _name(tool), "arguments": '{"x": "y"}'}}
        for identifier, tool in zip(_IDS[:count], _TOOLS, strict=False)
    ]
    results = [
        {"role": "tool", "tool_call_id": identifier, "content": result}
        for identifier, result in zip(_IDS[:count], _RESULTS, strict=False)
    ]
    return [{"role": "user", "content": _USER}, {"role": "assistant", "content": "", "tool_calls": calls}, *results]


_WRITERS: dict[str, Callable[[str], str]] = {
    "as is": str, "json": lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    "ascii": lambda text: json.dumps(text)[1:-1], "repr": lambda text: repr(text + '"')[1:-2],
}  # fmt: skip


def _pieces(text: str, count: int) -> list[list[Item]]:
    """The parts around results: before the first, between them, behind the last."""
    found: list[list[Item]] = []
    for at in range(count):
        ways = [
            (place, Item("result", "", written, trims), len(shown))
            for trims in (False, True)
            for written, write in _WRITERS.items()
            if (place := text.find(shown := write(_RESULTS[at].strip() if trims else _RESULTS[at]))) >= 0
        ]
        if not ways:
            raise UnsupportedError("the chat template drops a result")
        place, item, size = ways[0]
        before, text = text[:place], text[place + size :]
        found.append([*_named(before, at), item])
    if any(each in text for each in (*_IDS, *map(_name, _TOOLS))):
        raise UnsupportedError("the chat template names a call behind its result")
    return [*found, _trusted(text)]


def _named(text: str, at: int) -> list[Item]:
    """The items of the text before a result, with the name and identifier of its call."""
    kinds = {_name(_TOOLS[at]): "name", _IDS[at]: "id"}
    if any(each in text for each in (_name(_TOOLS[1 - at]), _IDS[1 - at])):
        raise UnsupportedError("the chat template writes results in another order than calls")
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    return [item for piece in pieces for item in ([Item(kinds[piece])] if piece in kinds else _trusted(piece))]
