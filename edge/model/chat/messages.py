"""Messages of a conversation and tools, in the form of OpenAI's protocol: checked, and with marks for their texts.

A template sees a mark in place of every text that users or models wrote (`edge/model/chat/rendering.py`): contents,
names, descriptions, arguments. Only the words of JSON Schema stay, since templates test them. Apart from contents,
equal texts of the tools share a mark, as do equal texts of the messages, and marks sort as the texts do. In the
rendered text, contents of messages are segments of their own, as in prompts of a single turn. Other texts are encoded
together with the template's text around them, as in training.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, count, groupby
from typing import Any

from edge.errors import InputError
from edge.model.chat.parts import MEDIA, Segment, Text, has_media, kind_of, newest, text_of_parts
from edge.model.chat.rendering import BLANKS, GUISES, MARK, MOST_TEXT, mark, number_of, reveal, written
from edge.model.parts.text import well_formed
from edge.records import dataclass
from edge.values import brief

ROLES = ("system", "developer", "user", "assistant", "tool")
SEEN = ("user", "tool")  # whose messages may have pictures and sounds
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")  # templates have all three
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/-]{0,127}")
_DEEPEST = 64  # of nested JSON
_MOST_TEXTS = 1_000_000
_GROWTH = 16  # templates repeat texts no more often than this, on average
_LONGEST_BLANKS = 64  # at a text's ends that stand beside its mark; longer runs are part of the marked text
_DISGUISE = str.maketrans(BLANKS, GUISES)

# Words of JSON Schema and of the protocol, which templates test and look up.
_WORDS = frozenset(
    re.findall(
        r"\S+",
        """type function name description parameters properties required items enum nullable default strict anyOf oneOf
        allOf additionalProperties title format minimum maximum minLength maxLength minItems maxItems pattern const
        response return arguments id string number integer boolean array object null STRING NUMBER INTEGER BOOLEAN ARRAY
        OBJECT $ref $defs definitions""",
    )
)


@dataclass(frozen=True)
class Call:
    """A call of a tool. arguments: a JSON object as text, or the text that a model wrote instead of one."""

    id: str
    name: str
    arguments: str

    @property
    def parsed(self) -> Any:
        """The arguments as an object, or as text if that is not a JSON object."""
        try:
            found = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


@dataclass(frozen=True)
class Message:
    role: str
    content: Text = ""
    calls: tuple[Call, ...] = ()
    thoughts: str | None = None
    call_id: str | None = None
    name: str | None = None
    responses: tuple[Message, ...] = ()  # results of its calls, for templates that expect them here


def parse_messages(messages: object, *, senses: Collection[str] = ()) -> list[Message]:
    """Check messages, and merge the leading system messages into one. senses: kinds of media (`MEDIA`) that the model
    perceives. Raises InputError."""
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes) or not messages:
        raise InputError(
            f"messages must be a list such as [{{'role': 'user', 'content': 'Hi'}}], not {brief(messages)}"
        )
    question = newest([str(each.get("role")) if isinstance(each, Mapping) else "" for each in messages])
    parsed = [
        _message(number, each, asks=number == question + 1, senses=senses) for number, each in enumerate(messages, 1)
    ]
    first = next((at for at, each in enumerate(parsed) if each.role not in ("system", "developer")), len(parsed))
    if first > 1:
        text = "\n\n".join(str(each.content) for each in parsed[:first])
        parsed[:first] = [replace(parsed[0], content=text)]
    return _matched(parsed)


def _matched(messages: list[Message]) -> list[Message]:
    """The messages with an identifier of its own for each call, and each result with that of its call: the nearest
    earlier one that has no result yet. Identifiers, which clients may number anew in each turn, and names choose among
    the calls of that turn. Neighbouring results stand in the order of their calls."""
    found: list[Message] = []
    turns: list[list[_Waiting]] = []  # calls, by the messages that made them without results in between
    taken: set[str] = set()
    for message in messages:
        if message.calls:
            calls = tuple(replace(each, id=_own(each.id, taken)) for each in message.calls)
            if not turns or found[-1].role != "assistant":
                turns.append([])
            turns[-1] += [_Waiting(given.id, own) for given, own in zip(message.calls, calls, strict=True)]
            message = replace(message, calls=calls)
        elif message.role == "tool" and (waiting := _call_of(message, turns)) is not None:
            waiting.answered = True
            message = replace(message, call_id=waiting.call.id, name=waiting.call.name)
        found.append(message)
    order = {waiting.call.id: at for at, waiting in enumerate(chain.from_iterable(turns))}
    runs = groupby(found, lambda each: each.role == "tool")
    last = len(order)
    return [
        each
        for results, run in runs
        for each in (sorted(run, key=lambda result: order.get(result.call_id or "", last)) if results else run)
    ]


@dataclass
class _Waiting:
    """A call that may wait for its result."""

    given: str  # the client's identifier
    call: Call
    answered: bool = False


def _own(identifier: str, taken: set[str]) -> str:
    """An identifier that no other call has."""
    names = chain([identifier] if identifier else [], (f"{identifier or 'call'}_{number}" for number in count(1)))
    own = next(name for name in names if name not in taken)
    taken.add(own)
    return own


def _call_of(result: Message, turns: list[list[_Waiting]]) -> _Waiting | None:
    """The call that a result belongs to; None if there is none."""

    def same() -> Iterator[_Waiting]:
        return (each for turn in reversed(turns) for each in turn if each.given == result.call_id)

    if result.call_id:
        found = next((each for each in same() if not each.answered), None) or next(same(), None)  # or a second result
        if found is not None:
            return found
    latest = ([each for each in turn if not each.answered] for turn in reversed(turns))
    waiting = next((turn for turn in latest if turn), [])
    return next((each for each in waiting if each.call.name == result.name), waiting[0] if waiting else None)


def parse_tools(tools: object) -> list[dict[str, Any]] | None:
    """Check tools; None if there are none. Raises InputError."""
    if tools is None:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str | bytes):
        raise InputError(f"tools must be a list, not {brief(tools)}", "tools")
    found = [parse_tool(each, f"tools[{number}]", f"tool {number + 1}") for number, each in enumerate(tools)]
    names = [each["function"]["name"] for each in found]
    for number, name in enumerate(names, 1):
        if names.index(name) + 1 < number:
            raise InputError(f"tool {number}: another tool is called {name}", "tools")
    return found or None


def parse_tool(tool: object, param: str, where: str = "") -> dict[str, Any]:
    """Check a tool, and return it in the form of OpenAI's chats. param: its field in a request. where: the same in
    words. Raises InputError."""
    where = where or param
    if not isinstance(tool, Mapping):
        raise InputError(f"{where} must be an object, not {brief(tool)}", param)
    if tool.get("type", "function") != "function":
        raise InputError(f"{where} is of type {brief(tool['type'])}: only functions are supported", f"{param}.type")
    function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
    param += ".function" if "function" in tool else ""
    if not isinstance(function, Mapping):
        raise InputError(f"{where}: function must be an object, not {brief(function)}", param)
    _checked_name(where, function.get("name"), f"{param}.name")
    parameters = function.get("parameters")
    if not isinstance(function.get("description") or "", str):
        why = f"{where}: description must be text, not {brief(function['description'])}"
        raise InputError(why, f"{param}.description")
    if parameters is not None and not isinstance(parameters, Mapping):
        why = f"{where}: parameters must be a JSON schema, not {brief(parameters)}"
        raise InputError(why, f"{param}.parameters")
    _check_json(where, function)
    empty = {"type": "object", "properties": {}}
    said = dict(function)
    return {"type": "function", "function": {**said, "description": said.get("description") or "",
                                             "parameters": dict(parameters or empty)}}  # fmt: skip


def _message(number: int, message: object, *, asks: bool, senses: Collection[str]) -> Message:
    where = f"message {number}"
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object, not {brief(message)}")
    role = message.get("role")
    if role == "function":
        role = "tool"
    if role not in ROLES:
        raise InputError(f"{where}: role must be one of {', '.join(ROLES)}, not {brief(role)}")
    given = message.get("content")
    if role == "user" and (given is None or (isinstance(given, list | tuple) and not given)):
        raise InputError(f"{where} has no content: a message of the user has a text, or a list of parts")
    content = _content(given, f"{where}: content", asks=asks, senses=senses if role in SEEN else ())
    listed = message.get("tool_calls") or []
    if not isinstance(listed, list | tuple):
        raise InputError(f"{where}: tool_calls must be a list, not {brief(listed)}")
    calls = tuple(_call(where, at, each) for at, each in enumerate(listed, 1))
    if calls and role != "assistant":
        raise InputError(f"{where}: only the assistant has tool_calls")
    thoughts = next((said for name in THOUGHT_NAMES if (said := message.get(name))), None)
    texts = {"reasoning_content": thoughts, **{field: message.get(field) for field in ("tool_call_id", "name")}}
    for field, value in texts.items():
        if value is not None and not isinstance(value, str):
            raise InputError(f"{where}: {field} must be text, not {brief(value)}")
    name, call_id = message.get("name"), message.get("tool_call_id")
    return Message(role, content, calls, thoughts if role == "assistant" else None, call_id, name)


def _content(content: Any, where: str, *, asks: bool, senses: Collection[str]) -> Text:
    """The text of a content; with media that the model perceives, its parts in their order."""
    if not has_media(content, senses):
        return well_formed(text_of_parts(content, where, "\n", strict=asks))
    from edge.model.chat.media_parts import medium_of  # here: few runs see pictures

    found = list[Segment]()
    for media, run in groupby(enumerate(content), lambda each: kind_of(each[1]) in senses):
        if media:
            found += (Segment("", trusted=False, medium=medium_of(part, f"{where}[{at}]")) for at, part in run)
        elif text := well_formed(text_of_parts([part for _, part in run], where, "\n", strict=asks)):
            found.append(Segment(text, trusted=False))
    return tuple(found)


def _call(where: str, at: int, call: object) -> Call:
    where = f"{where}, call {at}"
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise InputError(f"{where} must be an object with a function, not {brief(call)}")
    arguments, identifier = function.get("arguments"), call.get("id")
    arguments, identifier = "{}" if arguments is None else arguments, "" if identifier is None else identifier
    name = _checked_name(where, function.get("name"))
    if isinstance(arguments, Mapping):
        _check_json(where, arguments)
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str) or not isinstance(identifier, str):
        raise InputError(f"{where}: arguments must be a JSON object as text, and its id a text")
    parsed = Call(identifier, name, well_formed(arguments))
    _check_json(where, parsed.parsed)
    return parsed


def _checked_name(where: str, name: object, param: str | None = None) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        why = f"{where}: the name of a function has letters, digits, _, -, . and the like, not {brief(name)}"
        raise InputError(why, param)
    return name


def _check_json(where: str, value: object, depth: int = 0) -> None:
    """Raise InputError for a value that JSON cannot hold, or that is nested too deeply."""
    if depth > _DEEPEST:
        raise InputError(f"{where} is nested more deeply than {_DEEPEST} levels")
    if isinstance(value, Mapping):
        for key, each in value.items():
            if not isinstance(key, str):
                raise InputError(f"{where}: the name of a field must be text, not {brief(key)}")
            _check_json(where, each, depth + 1)
    elif isinstance(value, list | tuple):
        for each in value:
            _check_json(where, each, depth + 1)
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise InputError(f"{where}: {brief(value)} is no JSON")


class Marked:
    """Messages and tools for a template, with marks. Raises InputError if there are too many texts.

    guises: whether disguised blanks may stand beside marks; False for a template that contains such characters itself.
    lists: the template reads contents as lists of parts. markers: what it writes for media among them, by their kind;
    others stand within a content's mark.
    """

    def __init__(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, guises: bool = True,
        lists: bool = False, markers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self._guises, self._lists, self._markers = guises, lists, markers or {}
        self._media = [part for each in messages for part in self._written(each.content)]
        own, others = _sorted(_strings(tools)), _sorted(_texts(messages))  # a name in both has two marks
        embedded = [*own, *others]
        if len(embedded) + 2 * len(messages) > _MOST_TEXTS:
            raise InputError(f"the conversation has more than {_MOST_TEXTS} texts")
        self._of_tools = {text: number for number, text in enumerate(own)}
        self._numbers = {text: number for number, text in enumerate(others, len(own))}
        self._first_content = len(embedded)
        self._all: list[Text] = list(embedded)
        self.contents: list[int] = []  # numbers of the contents' marks; -1 where there is none
        self.messages = [self._message(each) for each in messages]
        self.tools = self._value(tools, self._of_tools)
        self._most = MOST_TEXT + _GROWTH * sum(_size(text) for text in self._all)

    def _message(self, message: Message) -> dict[str, Any]:
        self.contents.append(len(self._all))
        found: dict[str, Any] = {"role": message.role, "content": self._parts(message.content)}
        if len(self._all) == self.contents[-1]:
            self.contents[-1] = -1
        if message.thoughts:
            found |= dict.fromkeys(THOUGHT_NAMES, self._content(message.thoughts.strip("\r\n")))
        if message.calls:
            found["tool_calls"] = [
                {
                    "id": self._value(call.id),
                    "type": "function",
                    "function": {"name": self._value(call.name), "arguments": self._value(call.parsed)},
                }
                for call in message.calls
            ]
        if message.responses:
            found["tool_responses"] = [
                {"name": self._value(each.name or "unknown"), "response": self._content(each.content)}
                for each in message.responses
            ]
        for name, text in (("tool_call_id", message.call_id), ("name", message.name)):
            if text is not None:
                found[name] = self._value(text)
        return found

    def _parts(self, content: Text) -> str | list[dict[str, str]]:
        """A message's content, in parts where the template reads them, or writes pictures among them."""
        if not isinstance(content, str) and self._written(content):
            found = list[dict[str, str]]()
            for media, run in groupby(content, self._writes):
                parts = tuple(run)
                plain = len(parts) == 1 and not (parts[0].trusted or parts[0].medium)
                found += (
                    [{"type": MEDIA[each.kind]} for each in parts]
                    if media
                    else [self._part(str(parts[0].text) if plain else parts)]
                )
            return found
        return [self._part(content)] if self._lists else self._content(content)

    def _writes(self, part: Segment) -> bool:
        """Whether the template writes a part, a medium."""
        return part.medium is not None and part.kind in self._markers

    def _written(self, content: Text) -> list[Segment]:
        """The media in a content that the template writes."""
        return [] if isinstance(content, str) else [*filter(self._writes, content)]

    def _part(self, text: Text) -> dict[str, str]:
        return {"type": "text", "text": self._content(text)}

    def _content(self, text: Text) -> str:
        if not isinstance(text, str):
            self._all.append(text)
            return mark(len(self._all) - 1)
        before, core, after = _split_blanks(text) if self._guises else ("", text, "")
        if core:
            self._all.append(core)
            core = mark(len(self._all) - 1)
        return before.translate(_DISGUISE) + core + after.translate(_DISGUISE)

    def _value(self, value: Any, numbers: Mapping[str, int] | None = None) -> Any:
        """A JSON value with marks; words of JSON Schema stay."""
        numbers = self._numbers if numbers is None else numbers
        if isinstance(value, str):
            return value if value in _WORDS or not value else mark(numbers[well_formed(value)])
        if isinstance(value, Mapping):
            return {self._value(key, numbers): self._value(each, numbers) for key, each in value.items()}
        return [self._value(each, numbers) for each in value] if isinstance(value, list | tuple) else value

    def shows(self, rendered: str, name: str, *, of_tool: bool = False) -> bool:
        """Whether a rendered text contains the name of a call or, with `of_tool`, of a tool."""
        numbers = self._of_tools if of_tool else self._numbers
        return (name if name in _WORDS else mark(numbers[name])[1:]) in rendered

    def fill(self, rendered: str, template: str) -> list[Segment]:
        """The segments of a prompt. template: what errors call it. Raises InputError if it repeats texts too often, or
        makes up a mark."""
        segments: list[Segment] = []
        at, size = 0, 0
        for found in MARK.finditer(rendered):
            number = number_of(found[2])
            if number >= len(self._all):
                raise InputError(f"{template} writes a text that is none of the conversation")
            text = self._all[number]
            size += _size(text)
            if size > self._most:
                raise InputError(f"{template} repeats the conversation too often")
            between = rendered[at : found.start()]
            at = found.end()
            if number < self._first_content:
                segments.append(Segment(reveal(between) if self._guises else between, trusted=True))
                segments.append(Segment(written(str(text), found[1]), trusted=False, embedded=True))
                continue
            own, after = "", ""
            if self._guises:  # blanks beside the mark belong to the content
                own = between[len(between.rstrip(GUISES)) :]
                after = rendered[at : _after_guises(rendered, at)]
                between, at = reveal(between[: len(between) - len(own)]), at + len(after)
            segments.append(Segment(between, trusted=True))
            if isinstance(text, str):
                whole = reveal(own) + written(text, found[1]) + reveal(after)
                segments.append(Segment(whole, trusted=False))
            else:
                segments += text
        segments.append(Segment(reveal(rendered[at:]) if self._guises else rendered[at:], trusted=True))
        if self._media:
            segments = [*self._perceived(segments)]
        return [segment for segment in segments if segment.text or segment.medium]

    def _perceived(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """The segments with media in place of the markers in the template's own text."""
        kinds = {self._markers[kind]: kind for kind in (each.kind for each in self._media)}
        markers = re.compile("|".join(map(re.escape, kinds)))
        waiting = {kind: iter([each for each in self._media if each.kind == kind]) for kind in kinds.values()}
        for each in segments:
            if not each.trusted or each.medium:
                yield each
                continue
            text, at = str(each.text), 0
            for found in markers.finditer(text):
                yield replace(each, text=text[at : found.start()])
                yield next(waiting[kinds[found[0]]])
                at = found.end()
            yield replace(each, text=text[at:])

    def media_missing(self, rendered: str) -> set[str]:
        """The kinds of media whose markers the template does not write once for each medium."""
        counts = Counter(each.kind for each in self._media)
        return {kind for kind, count in counts.items() if rendered.count(self._markers[kind]) != count}

    def dropped(self, rendered: str) -> Iterator[int]:
        """Indexes of messages whose content the rendered text lacks."""
        shown = {number_of(found[2]) for found in MARK.finditer(rendered)}
        for index, number in enumerate(self.contents):
            if number >= 0 and number not in shown:
                yield index


def _after_guises(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in GUISES:
        at += 1
    return at


def _size(text: Text) -> int:
    return len(text) if isinstance(text, str) else sum(len(str(segment.text)) for segment in text)


def _split_blanks(text: str) -> tuple[str, str, str]:
    """Blanks before a text, the text, blanks after it."""
    core = text.strip(BLANKS)
    start = text.find(core) if core else len(text)
    before, after = text[:start], text[start + len(core) :]
    if max(len(before), len(after)) > _LONGEST_BLANKS:
        return "", text, ""
    return before, core, after


def _sorted(texts: Iterable[str]) -> list[str]:
    """The distinct texts, in the order of Jinja2's dictsort."""
    return sorted({*texts}, key=lambda text: (text.lower(), text))


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    """The texts of messages other than contents: names, identifiers and arguments."""
    for message in messages:
        yield from _strings([message.call_id, message.name, *(each.name or "unknown" for each in message.responses)])
        for call in message.calls:
            yield from _strings([call.id, call.name, call.parsed])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value and value not in _WORDS:
            yield well_formed(value)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _strings(key)
            yield from _strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _strings(each)
