"""A streaming parser of calls in generated text. It finds the same calls however the text is split into pieces.

Generators read the text character by character, and wait for the next one. Text that begins like a call and turns out
not to be one remains text. Once a call has begun, its arguments are passed on, as JSON, as soon as they are certain.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from edge.json_schema import is_text, properties_of
from edge.records import dataclass
from edge.tools.formats import ToolFormat
from edge.tools.json_values import read_text, read_value
from edge.tools.literals import LITERALS, Literals, quoted
from edge.tools.marks import overlap
from edge.tools.scanner import BLANKS, LONGEST_NAME, Chars, OtherFormError, Scanner


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


class ToolParser:
    """Separates calls from text.

    tools: as in OpenAI's protocol; a call of any other function is text. calls: the number of calls that have begun.
    """

    def __init__(self, form: ToolFormat, tools: Iterable[Mapping[str, Any]], new_id: Callable[[], str] | None = None):
        functions = [tool.get("function", tool) for tool in tools]
        self._form, self._new_id = form, new_id or (lambda: f"call_{secrets.token_hex(12)}")
        self._schemas = {each["name"]: each.get("parameters") or {} for each in functions}
        self.calls = 0
        self._events: list[Event] = []
        self._blanks = ""  # at the end of the text so far: left out before a call
        self._scan = Scanner()  # its `raw` holds the text of a call that has not begun
        self._literals = Literals(self._scan, self._give, form.quote)
        self._open: int | None = None  # index of the call that has begun
        self._plain = True  # nothing but blanks and calls so far
        self._whole = False  # the newest calls lack at most their closing
        self._cut = False  # the text ended before its writer did
        self._machine = self._read()
        next(self._machine)

    def feed(self, text: str) -> list[Event]:
        """Parse a piece of text, and return its events."""
        for char in text:
            self._machine.send(char)
        return self._taken()

    def finish(self, *, cut: bool = False) -> list[Event]:
        """End the text, and return the remaining events. cut: something else ended it than its writer, so that a mark
        without its call's name at the end is no text."""
        self._cut = cut
        try:
            while True:
                self._machine.send("")
        except StopIteration:
            return self._taken()

    @property
    def whole(self) -> bool:
        """Whether the text ended with calls of which only the closing may be missing."""
        return self._whole and self._plain

    def _taken(self) -> list[Event]:
        found, self._events = merged(self._events), []
        return found

    # The text

    def _read(self) -> Chars:
        form = self._form
        openings = [mark for mark in (form.opening, *form.also) if mark]
        starts = (
            {"json": "{[", "tags": "", "call": "", "python": "[", "named": "", "header": ""}[form.body]
            if form.bare
            else ""
        )
        firsts = {mark[0] for mark in openings}
        yield from self._scan.take()
        while self._scan.next:
            if self._plain and self._scan.next in starts:
                yield from self._try("")
                continue
            held = ""
            while self._scan.next:
                held += self._scan.next
                if len(held) == 1 and held not in firsts:  # most characters
                    self._say(held)
                    held = ""
                    yield from self._scan.take()
                    if self._plain and self._scan.next and self._scan.next in starts:
                        break
                    continue
                mark = next((mark for mark in openings if held.endswith(mark)), None)
                if mark is not None:
                    self._say(held[: -len(mark)])
                    yield from self._scan.take()
                    yield from self._try(mark)
                    break
                keep = max((overlap(held, mark) for mark in openings), default=0)
                self._say(held[: len(held) - keep])
                held = held[len(held) - keep :]
                yield from self._scan.take()
                if self._plain and not held and self._scan.next and self._scan.next in starts:
                    break
            else:
                self._say(held)
        if self._blanks and not (self.calls and self._plain):
            self._events.append(TextPiece(self._blanks))

    def _say(self, text: str) -> None:
        """Emit text; hold back the blanks at its end until more text follows."""
        if self._plain and self.calls and not text.strip(BLANKS + ";"):
            return  # between calls
        text = self._blanks + text
        core = text.rstrip(BLANKS)
        self._blanks = text[len(core) :]
        if core:
            self._plain = False
            self._events.append(TextPiece(core))

    def _try(self, mark: str) -> Chars:
        """Read calls after their mark; if they are none, read the characters again as text."""
        self._scan.raw = [mark]
        before, self._whole = self.calls, False
        try:
            yield from self._calls(mark)
            if self.calls == before:
                raise OtherFormError  # an empty list
            self._whole = True
        except OtherFormError:
            if self._open is not None:
                self._events.append(CallCut(self._open))
                self._open, self._scan.raw = None, None
                yield from self._skip()
            elif mark and self._cut and not self._form.begins:
                self._whole = self.calls > before and not "".join(self._scan.raw or ()).strip(BLANKS)
                self._scan.raw = None
            else:  # not a call: read its characters again, as text
                raw = self._scan.raw or []
                count = 0 if self.calls > before else 1 if mark else 2
                self._scan.raw, self._plain = None, self._plain and not count
                self._scan.give_back(raw[count:])
                self._say("".join(raw[:count]))
        self._scan.raw = None
        if self.calls > before:
            self._blanks = ""
            self._plain = True

    def _skip(self) -> Chars:
        """Skip the rest of a malformed call."""
        closing = self._form.closing
        held = ""
        while self._scan.next and not (closing and held.endswith(closing)):
            held = (held + self._scan.next)[-max(1, len(closing)) :]
            yield from self._scan.take()

    # Calls

    def _calls(self, mark: str) -> Chars:
        form = self._form
        if mark == "<function=":
            yield from self._tagged(begun=True)
        else:
            yield from self._scan.skip_blanks()
            if self._scan.next == "{" or (form.body == "json" and self._scan.next == "["):
                yield from self._json_calls()
            elif form.body == "tags":
                yield from self._tagged()
            elif form.body == "call":
                yield from self._scan.expect("call:")
                yield from self._literal_call("{", "}", ":")
            elif form.body == "named":
                yield from self._named()
            elif form.body == "header":
                yield from self._headed()
            else:
                yield from self._python_calls()
        if form.closing and mark:
            yield from self._close(form.closing)

    def _close(self, closing: str) -> Chars:
        """Read the closing mark, which some models leave out, and which the end of the text may cut."""
        yield from self._scan.skip_blanks()
        if self._scan.next != closing[0]:
            return
        for char in closing:
            if self._scan.next:
                yield from self._scan.expect(char)

    def _begin(self, name: str) -> None:
        if name not in self._schemas:
            raise OtherFormError
        self._open, self._scan.raw, self._blanks = self.calls, None, ""
        self._events.append(CallBegin(self.calls, self._new_id(), name))
        self.calls += 1

    def _give(self, text: str) -> None:
        """Emit a piece of the arguments."""
        assert self._open is not None
        self._events.append(ArgumentPiece(self._open, text))

    def _end(self) -> None:
        assert self._open is not None
        self._events.append(CallEnd(self._open))
        self._open, self._scan.raw = None, []

    def _json_calls(self) -> Chars:
        if self._scan.next == "[":
            yield from self._scan.take()
            yield from self._scan.skip_blanks()
            if self._scan.next.isalpha() or self._scan.next == "_":
                yield from self._python_calls(listed=True)
                return
            while self._scan.next != "]":
                yield from self._json_call()
                yield from self._scan.skip_blanks()
                if self._scan.next == ",":
                    yield from self._scan.take()
                    yield from self._scan.skip_blanks()
                elif self._scan.next != "]":
                    raise OtherFormError
            yield from self._scan.take()
            return
        yield from self._json_call()
        while True:  # several objects between one pair of marks
            yield from self._scan.skip_blanks()
            if self._scan.next != "{":
                return
            yield from self._json_call()

    def _json_call(self) -> Chars:
        name, early = "", ""
        yield from self._scan.expect("{")
        yield from self._scan.skip_blanks()
        while self._scan.next != "}":
            key = yield from read_text(self._scan)
            yield from self._scan.skip_blanks()
            yield from self._scan.expect(":")
            yield from self._scan.skip_blanks()
            if key in ("name", "function") and self._scan.next == '"' and not name:
                name = yield from read_text(self._scan)
                if name not in self._schemas:
                    raise OtherFormError
                if early:
                    self._begin(name)
                    self._give(early)
            elif key in ("arguments", "parameters") and self._open is None and not early:
                if name and self._scan.next == "{":
                    self._begin(name)
                    yield from read_value(self._scan, self._give)
                else:
                    parts: list[str] = []
                    yield from read_value(self._scan, parts.append)
                    early = _as_object("".join(parts))
                    if name:
                        self._begin(name)
                        self._give(early)
            else:
                yield from read_value(self._scan, lambda _: None)
            yield from self._scan.skip_blanks()
            if self._scan.next == ",":
                yield from self._scan.take()
                yield from self._scan.skip_blanks()
                if self._scan.next != '"':
                    raise OtherFormError
            elif self._scan.next != "}":
                raise OtherFormError
        if self._open is None:
            self._begin(name)
            self._give("{}")
        yield from self._scan.take()
        self._end()

    def _named(self) -> Chars:
        name = ""
        while self._scan.next != "{":
            name += self._scan.next
            if not self._scan.next or len(name) > LONGEST_NAME:
                raise OtherFormError
            yield from self._scan.take()
        self._begin(re.split(r"\[(?:ARGS|CALL_ID)\]", name)[0].strip())
        yield from read_value(self._scan, self._give)
        self._end()

    def _headed(self) -> Chars:
        header, end = "", "<|message|>"
        while not header.endswith(end):
            header += self._scan.next
            if not self._scan.next or len(header) > 2 * LONGEST_NAME:
                raise OtherFormError
            yield from self._scan.take()
        yield from self._scan.skip_blanks()
        if self._scan.next != "{":
            raise OtherFormError
        self._begin(re.split(r"[\s<]", header, maxsplit=1)[0])
        yield from read_value(self._scan, self._give)
        self._end()

    def _tagged(self, begun: bool = False) -> Chars:
        if not begun:
            yield from self._scan.expect("<function=")
        name = yield from self._scan.until(">")
        self._begin(name.strip(" \"'"))
        properties = properties_of(self._schemas[name.strip(" \"'")])
        self._give("{")
        yield from self._scan.skip_blanks()
        first = True
        while True:
            yield from self._scan.expect("<")
            if self._scan.next != "p":
                break
            yield from self._scan.expect("parameter=")
            key = yield from self._scan.until(">")
            self._give(("" if first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
            yield from self._tag_value(properties.get(key))
            yield from self._scan.skip_blanks()
            first = False
        yield from self._scan.expect("/function>")
        self._give("}")
        self._end()

    def _tag_value(self, schema: Any) -> Chars:
        """Read a value up to `</parameter>`: text where the schema wants a string; else JSON, a literal, or text."""
        if self._scan.next == "\n":
            yield from self._scan.take()
        parts: list[str] = []
        if text := is_text(schema):
            self._give('"')
        yield from self._scan.text_until(
            "\n</parameter>", (lambda text: self._give(quoted(text))) if text else parts.append
        )
        if text:
            self._give('"')
            return
        value = "".join(parts)
        try:
            json.loads(value, parse_constant=_refuse)
        except (ValueError, RecursionError):
            value = json.dumps(LITERALS.get(value.strip(), value), ensure_ascii=False)
        self._give(value.strip())

    def _python_calls(self, listed: bool = False) -> Chars:
        if self._scan.next == "[":
            listed = True
            yield from self._scan.take()
        while True:
            yield from self._scan.skip_blanks()
            if listed and self._scan.next == "]":
                break
            yield from self._literal_call("(", ")", "=")
            yield from self._scan.skip_blanks()
            if listed and self._scan.next == ",":
                yield from self._scan.take()
            elif not listed:
                return
            elif self._scan.next != "]":
                raise OtherFormError
        yield from self._scan.take()

    def _literal_call(self, opening: str, closing: str, assign: str) -> Chars:
        name = yield from self._scan.until(opening)
        self._begin(name.strip())
        yield from self._literals.fields(closing, assign)
        self._end()


def merged(events: Iterable[Event]) -> list[Event]:
    """Merge adjacent pieces of a text, or of a call's arguments, into one event."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextPiece) and isinstance(last, TextPiece):
            found[-1] = TextPiece(last.text + event.text)
        elif isinstance(event, ArgumentPiece) and isinstance(last, ArgumentPiece):
            found[-1] = ArgumentPiece(event.index, last.text + event.text)
        else:
            found.append(event)
    return found


def _as_object(text: str) -> str:
    """The JSON object of arguments that stand before the name, or as text within JSON. Raises OtherFormError."""
    try:
        value = json.loads(text)
        if isinstance(value, str):
            text, value = value, json.loads(value or "{}")
    except (ValueError, RecursionError):
        raise OtherFormError from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise OtherFormError
    return text or "{}"


def _refuse(constant: str) -> None:
    raise ValueError(constant)
