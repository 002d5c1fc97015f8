"""Calls in generated text, found while it is generated: the same ones whichever way the text is split into pieces.

The text is read character by character, by generators that wait for the next one. What begins like a call and turns out
not to be one is text. Once a call has begun, its arguments are passed on, as JSON, as soon as they are sure.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from typing import Any

from edge.dataclass import dataclass
from edge.tools.formats import ToolFormat
from edge.tools.marks import overlap

_DEEPEST = 64  # of nested values
_LONGEST_NAME = 128
_BLANKS = " \t\r\n"
_LITERALS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_SIZES = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class TextPiece:
    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentPiece:
    """JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    index: int


@dataclass(frozen=True)
class CallCut:
    """The call is not complete: the text ended within it, or went on in another form."""

    index: int


Event = TextPiece | CallBegin | ArgumentPiece | CallEnd | CallCut
Chars = Generator[None, str, None]


class _OtherFormError(Exception):
    """The text is not what the form wants."""


class ToolParser:
    """Tells calls from text.

    tools: as in OpenAI's protocol; a call of any other function is text. calls: how many have begun.
    """

    def __init__(self, form: ToolFormat, tools: Iterable[Mapping[str, Any]], new_id: Callable[[], str] | None = None):
        functions = [tool.get("function", tool) for tool in tools]
        self._form, self._new_id = form, new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self.calls = 0
        self._events: list[Event] = []
        self._blanks = ""  # at the end of the text so far: left out before a call
        self._raw: list[str] | None = None  # of a call that has not begun
        self._next = ""  # the character that was read and not taken; "" at the end
        self._again: deque[str] = deque()  # characters that are read again
        self._open: int | None = None  # the call that has begun
        self._plain = True  # nothing but blanks and calls so far
        self._machine = self._read()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """Events of a piece of text."""
        for char in text:
            self._machine.send(char)
        return self._taken()

    def finish(self) -> list[Event]:
        """Events at the end of the text."""
        try:
            while True:
                self._machine.send("")
        except StopIteration:
            return self._taken()

    def _taken(self) -> list[Event]:
        found: list[Event] = []
        for event in self._events:  # one event for neighbours
            last = found[-1] if found else None
            if isinstance(event, TextPiece) and isinstance(last, TextPiece):
                found[-1] = TextPiece(last.text + event.text)
            elif isinstance(event, ArgumentPiece) and isinstance(last, ArgumentPiece):
                found[-1] = ArgumentPiece(event.index, last.text + event.text)
            else:
                found.append(event)
        self._events = []
        return found

    # The text

    def _read(self) -> Chars:
        form = self._form
        openings = [mark for mark in (form.opening, *form.also) if mark]
        starts = {"json": "{[", "tags": "", "call": "", "python": "[", "named": ""}[form.body] if form.bare else ""
        firsts = {mark[0] for mark in openings}
        self._next = yield from self._char()
        while self._next:
            if self._plain and self._next in starts:
                yield from self._try("")
                continue
            held = ""
            while self._next:
                held += self._next
                if len(held) == 1 and held not in firsts:  # most characters
                    self._say(held)
                    held = ""
                    self._next = yield from self._char()
                    if self._plain and self._next and self._next in starts:
                        break
                    continue
                mark = next((mark for mark in openings if held.endswith(mark)), None)
                if mark is not None:
                    self._say(held[: -len(mark)])
                    self._next = yield from self._char()
                    yield from self._try(mark)
                    break
                keep = max((overlap(held, mark) for mark in openings), default=0)
                self._say(held[: len(held) - keep])
                held = held[len(held) - keep :]
                self._next = yield from self._char()
                if self._plain and not held and self._next and self._next in starts:
                    break
            else:
                self._say(held)
        if self._blanks and not (self.calls and self._plain):
            self._events.append(TextPiece(self._blanks))

    def _say(self, text: str) -> None:
        """Text, whose blanks at the end wait for what follows."""
        if self._plain and self.calls and not text.strip(_BLANKS + ";"):
            return  # between calls
        text = self._blanks + text
        core = text.rstrip(_BLANKS)
        self._blanks = text[len(core) :]
        if core:
            self._plain = False
            self._events.append(TextPiece(core))

    def _try(self, mark: str) -> Chars:
        """Read calls behind their mark."""
        self._raw = [mark]
        before = self.calls
        try:
            yield from self._calls(mark)
            if self.calls == before:
                raise _OtherFormError  # an empty list
        except _OtherFormError:
            if self._open is not None:
                self._events.append(CallCut(self._open))
                self._open, self._raw = None, None
                yield from self._skip()
            else:  # read again what is no call
                raw = self._raw or []
                count = 0 if self.calls > before else 1 if mark else 2
                self._raw, self._plain = None, self._plain and not count
                self._give_back(raw[count:])
                self._say("".join(raw[:count]))
        self._raw = None
        if self.calls > before:
            self._blanks = ""
            self._plain = True

    def _skip(self) -> Chars:
        """Pass over the rest of a call that is malformed."""
        closing = self._form.closing
        held = ""
        while self._next and not (closing and held.endswith(closing)):
            held = (held + self._next)[-max(1, len(closing)) :]
            self._next = yield from self._char()

    # Calls

    def _calls(self, mark: str) -> Chars:
        form = self._form
        if mark == "<function=":
            yield from self._tagged(begun=True)
        else:
            yield from self._skip_blanks()
            if self._next == "{" or (form.body == "json" and self._next == "["):
                yield from self._json_calls()
            elif form.body == "tags":
                yield from self._tagged()
            elif form.body == "call":
                yield from self._expect("call:")
                yield from self._literal_call("{", "}", ":")
            elif form.body == "named":
                yield from self._named()
            else:
                yield from self._python_calls()
        if form.closing and mark:
            yield from self._close(form.closing)

    def _close(self, closing: str) -> Chars:
        """The closing mark, which some models leave out, and which may be cut."""
        yield from self._skip_blanks()
        if self._next != closing[0]:
            return
        for char in closing:
            if self._next:
                yield from self._expect(char)

    def _begin(self, name: str) -> None:
        if name not in self._schemas:
            raise _OtherFormError
        self._open, self._raw, self._blanks = self.calls, None, ""
        self._events.append(CallBegin(self.calls, self._new_id(), name))
        self.calls += 1

    def _give(self, text: str) -> None:
        """A piece of the arguments."""
        assert self._open is not None
        self._events.append(ArgumentPiece(self._open, text))

    def _end(self) -> None:
        assert self._open is not None
        self._events.append(CallEnd(self._open))
        self._open, self._raw = None, []

    def _json_calls(self) -> Chars:
        if self._next == "[":
            yield from self._take()
            yield from self._skip_blanks()
            if self._next.isalpha() or self._next == "_":
                yield from self._python_calls(listed=True)
                return
            while self._next != "]":
                yield from self._json_call()
                yield from self._skip_blanks()
                if self._next == ",":
                    yield from self._take()
                    yield from self._skip_blanks()
                elif self._next != "]":
                    raise _OtherFormError
            yield from self._take()
            return
        yield from self._json_call()
        while True:  # several objects between one pair of marks
            yield from self._skip_blanks()
            if self._next != "{":
                return
            yield from self._json_call()

    def _json_call(self) -> Chars:
        name, early = "", ""
        yield from self._expect("{")
        yield from self._skip_blanks()
        while self._next != "}":
            key = yield from self._json_text()
            yield from self._skip_blanks()
            yield from self._expect(":")
            yield from self._skip_blanks()
            if key in ("name", "function") and self._next == '"' and not name:
                name = yield from self._json_text()
                if name not in self._schemas:
                    raise _OtherFormError
                if early:
                    self._begin(name)
                    self._give(early)
            elif key in ("arguments", "parameters") and self._open is None and not early:
                if name and self._next == "{":
                    self._begin(name)
                    yield from self._json_value(self._give)
                else:
                    parts: list[str] = []
                    yield from self._json_value(parts.append)
                    early = _as_object("".join(parts))
                    if name:
                        self._begin(name)
                        self._give(early)
            else:
                yield from self._json_value(lambda _: None)
            yield from self._skip_blanks()
            if self._next == ",":
                yield from self._take()
                yield from self._skip_blanks()
                if self._next != '"':
                    raise _OtherFormError
            elif self._next != "}":
                raise _OtherFormError
        if self._open is None:
            self._begin(name)
            self._give("{}")
        yield from self._take()
        self._end()

    def _named(self) -> Chars:
        name = ""
        while self._next != "{":
            name += self._next
            if not self._next or len(name) > _LONGEST_NAME:
                raise _OtherFormError
            yield from self._take()
        self._begin(re.split(r"\[(?:ARGS|CALL_ID)\]", name)[0].strip())
        yield from self._json_value(self._give)
        self._end()

    def _tagged(self, begun: bool = False) -> Chars:
        if not begun:
            yield from self._expect("<function=")
        name = yield from self._until(">")
        self._begin(name.strip(" \"'"))
        properties = self._schemas[name.strip(" \"'")].get("properties") or {}
        self._give("{")
        yield from self._skip_blanks()
        first = True
        while True:
            yield from self._expect("<")
            if self._next != "p":
                break
            yield from self._expect("parameter=")
            key = yield from self._until(">")
            self._give(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._tag_value(properties.get(key))
            yield from self._skip_blanks()
            first = False
        yield from self._expect("/function>")
        self._give("}")
        self._end()

    def _tag_value(self, schema: Any) -> Chars:
        """A value up to `</parameter>`: text where the schema wants it, else JSON, if it is any."""
        if self._next == "\n":
            yield from self._take()
        is_text = not isinstance(schema, Mapping) or schema.get("type", "string") == "string"
        if isinstance(schema, Mapping) and "type" not in schema and schema.keys() & {"anyOf", "oneOf", "enum", "$ref"}:
            is_text = False
        parts: list[str] = []
        if is_text:
            self._give('"')
        yield from self._text_until(
            "\n</parameter>", (lambda text: self._give(_quoted(text))) if is_text else parts.append
        )
        if is_text:
            self._give('"')
            return
        text = "".join(parts)
        try:
            json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            literal = text.strip()
            text = json.dumps(_LITERALS.get(literal, text), ensure_ascii=False)
        self._give(text.strip())

    def _python_calls(self, listed: bool = False) -> Chars:
        if self._next == "[":
            listed = True
            yield from self._take()
        while True:
            yield from self._skip_blanks()
            if listed and self._next == "]":
                break
            yield from self._literal_call("(", ")", "=")
            yield from self._skip_blanks()
            if listed and self._next == ",":
                yield from self._take()
            elif not listed:
                return
            elif self._next != "]":
                raise _OtherFormError
        yield from self._take()

    # Values that are not JSON

    def _literal_call(self, opening: str, closing: str, assign: str) -> Chars:
        name = yield from self._until(opening)
        self._begin(name.strip())
        yield from self._fields(closing, assign, 0)
        self._end()

    def _fields(self, closing: str, assign: str, depth: int) -> Chars:
        """Keys and values, up to the closing bracket."""
        if depth > _DEEPEST:
            raise _OtherFormError
        self._give("{")
        yield from self._items(closing, partial(self._field, assign, depth))
        self._give("}")

    def _field(self, assign: str, depth: int) -> Chars:
        if self._next and self._next in self._quotes:
            yield from self._quoted_text()
            yield from self._skip_blanks()
            yield from self._expect(assign)
        else:
            key = yield from self._until(assign)
            self._give(json.dumps(key.strip(), ensure_ascii=False))
        self._give(": ")
        yield from self._skip_blanks()
        yield from self._value(depth + 1)

    def _items(self, closing: str, read: Callable[[], Chars]) -> Chars:
        """Items with commas between them, up to the closing bracket, before which one more comma may stand."""
        yield from self._skip_blanks()
        first = True
        while self._next != closing:
            if not first:
                yield from self._expect(",")
                yield from self._skip_blanks()
                if self._next == closing:
                    break
                self._give(", ")
            first = False
            yield from read()
            yield from self._skip_blanks()
        yield from self._take()

    def _value(self, depth: int) -> Chars:
        if depth > _DEEPEST:
            raise _OtherFormError
        if self._next and self._next in self._quotes:
            yield from self._quoted_text()
        elif self._next == "{":
            yield from self._take()
            yield from self._fields("}", ":", depth)
        elif self._next in ("[", "("):
            closing = {"[": "]", "(": ")"}[self._next]
            yield from self._take()
            self._give("[")
            yield from self._items(closing, partial(self._value, depth + 1))
            self._give("]")
        else:
            word = ""
            while self._next not in (",", ")", "]", "}", ":"):
                word += self._next
                if not self._next:
                    raise _OtherFormError
                yield from self._take()
            self._give(_word(word.strip()))

    @property
    def _quotes(self) -> str:
        """Characters with which a text in quotes begins."""
        return self._form.quote[:1] + '"' if self._form.quote else "'\""

    def _quoted_text(self) -> Chars:
        quote, mark = self._next, self._form.quote
        self._give('"')
        if mark and quote == mark[0]:
            yield from self._expect(mark)
            yield from self._text_until(mark, lambda text: self._give(_quoted(text)))
            self._give('"')
            return
        yield from self._take()
        while True:
            char = self._next
            yield from self._take()
            if not char:
                raise _OtherFormError
            if char == quote and self._next in ("", *_BLANKS, ",", ")", "]", "}", ":", "="):
                break  # models write apostrophes without a backslash
            if char == "\\":
                char = yield from self._python_escape()
            self._give(_quoted(char))
        self._give('"')

    def _python_escape(self) -> Generator[None, str, str]:
        char = self._next
        yield from self._take()
        if char not in _SIZES:
            return _ESCAPES.get(char, char if char and char in "\\'\"\n" else f"\\{char}")
        digits = ""
        while len(digits) < _SIZES[char] and self._next and self._next in "0123456789abcdefABCDEF":
            digits += self._next
            yield from self._take()
        code = int(digits or "0", 16)
        return chr(code) if len(digits) == _SIZES[char] and code < 0x110000 else f"\\{char}{digits}"

    # JSON

    def _json_value(self, give: Callable[[str], None], depth: int = 0) -> Chars:
        """Read a JSON value and pass it on as it comes. Characters that its texts must not contain are escaped."""
        if depth > _DEEPEST:
            raise _OtherFormError
        if self._next == '"':
            yield from self._json_text_raw(give)
        elif self._next and self._next in "{[":
            is_object, closing = self._next == "{", {"{": "}", "[": "]"}[self._next]
            give(self._next)
            yield from self._take()
            yield from self._give_blanks(give)
            first = True
            while first is False or self._next != closing:
                if is_object:
                    if self._next != '"':
                        raise _OtherFormError
                    yield from self._json_text_raw(give)
                    yield from self._give_blanks(give)
                    yield from self._expect(":")
                    give(":")
                    yield from self._give_blanks(give)
                yield from self._json_value(give, depth + 1)
                yield from self._give_blanks(give)
                if self._next != ",":
                    break
                give(",")
                yield from self._take()
                yield from self._give_blanks(give)
                first = False
            yield from self._expect(closing)
            give(closing)
        else:
            word = ""
            while self._next and (self._next.isalnum() or self._next in "+-."):
                word += self._next
                if len(word) > _LONGEST_NAME:
                    raise _OtherFormError
                yield from self._take()
            if not self._next or not (word in ("true", "false", "null") or _NUMBER.fullmatch(word)):
                raise _OtherFormError
            give(word)

    def _give_blanks(self, give: Callable[[str], None]) -> Chars:
        """Blanks between the parts of JSON; line breaks are left out."""
        while self._next and self._next in _BLANKS:
            if self._next == " ":
                give(" ")
            yield from self._take()

    def _json_text_raw(self, give: Callable[[str], None]) -> Chars:
        give('"')
        yield from self._take()
        while self._next != '"':
            char = self._next
            if not char:
                raise _OtherFormError
            if char != "\\":
                give(json.dumps(char)[1:-1] if char < " " else char)
            yield from self._take()
            if char == "\\":
                escaped = self._next
                if not escaped or escaped not in '"\\/bfnrtu':
                    raise _OtherFormError
                yield from self._take()
                if escaped == "u":
                    for _ in range(4):
                        if not self._next or self._next not in "0123456789abcdefABCDEF":
                            raise _OtherFormError
                        escaped += self._next
                        yield from self._take()
                give(f"\\{escaped}")
        yield from self._take()
        give('"')

    def _json_text(self) -> Generator[None, str, str]:
        """A short text, such as a name."""
        if self._next != '"':
            raise _OtherFormError
        parts: list[str] = []
        size = 0

        def add(part: str) -> None:
            nonlocal size
            size += 1
            if size > _LONGEST_NAME + 2:
                raise _OtherFormError
            parts.append(part)

        yield from self._json_text_raw(add)
        return str(json.loads("".join(parts)))

    # Characters

    def _take(self) -> Chars:
        if self._raw is not None:
            self._raw.append(self._next)
        self._next = yield from self._char()

    def _char(self) -> Generator[None, str, str]:
        return self._again.popleft() if self._again else (yield)

    def _give_back(self, chars: Iterable[str]) -> None:
        """Read these characters again, before the next one."""
        self._again.extendleft(reversed([*chars, self._next]))
        self._next = self._again.popleft()

    def _expect(self, text: str) -> Chars:
        for char in text:
            if self._next != char:
                raise _OtherFormError
            yield from self._take()

    def _skip_blanks(self) -> Chars:
        while self._next and self._next in _BLANKS:
            yield from self._take()

    def _until(self, mark: str) -> Generator[None, str, str]:
        """A name up to a character, which is taken, too."""
        name = ""
        while self._next != mark:
            name += self._next
            if not self._next or len(name) > _LONGEST_NAME or self._next in "\n\"'{}()<>[],":
                raise _OtherFormError
            yield from self._take()
        yield from self._take()
        return name

    def _text_until(self, mark: str, give: Callable[[str], None]) -> Chars:
        """Text up to a mark; a line break at the beginning of the mark may be missing."""
        marks = [mark, mark[1:]] if mark[0] == "\n" else [mark]
        held = ""
        while True:
            if not self._next:
                raise _OtherFormError
            held += self._next
            if found := next((each for each in marks if held.endswith(each)), None):
                if text := held[: -len(found)]:
                    give(text)
                yield from self._take()
                return
            keep = max(overlap(held, each) for each in marks)
            if len(held) > keep:
                give(held[: len(held) - keep])
                held = held[len(held) - keep :]
            yield from self._take()


def _quoted(text: str) -> str:
    """Text as it stands within quotation marks in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _word(word: str) -> str:
    """A bare word as JSON: a literal, a number, or text."""
    if word in _LITERALS:
        return json.dumps(_LITERALS[word])
    return word if _NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)


def _as_object(text: str) -> str:
    """Arguments that stand before the name, or as text within JSON."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value or "{}")
    except (ValueError, RecursionError):
        raise _OtherFormError from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise _OtherFormError
    return text or "{}"


def _refuse(constant: str) -> None:
    raise ValueError(constant)
