"""A reader of values that models write as Python, or in a notation of their own; it passes them on as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from functools import partial

from edge.tools.json_values import DEEPEST, NUMBER
from edge.tools.scanner import BLANKS, Chars, OtherFormError, Scanner

LITERALS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0"}
_SIZES = {"x": 2, "u": 4, "U": 8}


class Literals:
    """A reader of literals. scan: the source. give: takes pieces of JSON. quote: encloses texts; "": as in Python."""

    def __init__(self, scan: Scanner, give: Callable[[str], None], quote: str) -> None:
        self._scan, self._give, self._quote = scan, give, quote

    def fields(self, closing: str, assign: str, depth: int = 0) -> Chars:
        """Read keys and values, up to the closing bracket. Raises OtherFormError."""
        if depth > DEEPEST:
            raise OtherFormError
        self._give("{")
        yield from self._items(closing, partial(self._field, assign, depth))
        self._give("}")

    def _field(self, assign: str, depth: int) -> Chars:
        if self._scan.next and self._scan.next in self._quotes:
            yield from self._quoted_text()
            yield from self._scan.skip_blanks()
            yield from self._scan.expect(assign)
        else:
            key = yield from self._scan.until(assign)
            self._give(json.dumps(key.strip(), ensure_ascii=False))
        self._give(": ")
        yield from self._scan.skip_blanks()
        yield from self._value(depth + 1)

    def _items(self, closing: str, read: Callable[[], Chars]) -> Chars:
        """Read items with commas between them, up to the closing bracket; a trailing comma is allowed."""
        yield from self._scan.skip_blanks()
        first = True
        while self._scan.next != closing:
            if not first:
                yield from self._scan.expect(",")
                yield from self._scan.skip_blanks()
                if self._scan.next == closing:
                    break
                self._give(", ")
            first = False
            yield from read()
            yield from self._scan.skip_blanks()
        yield from self._scan.take()

    def _value(self, depth: int) -> Chars:
        if depth > DEEPEST:
            raise OtherFormError
        if self._scan.next and self._scan.next in self._quotes:
            yield from self._quoted_text()
        elif self._scan.next == "{":
            yield from self._scan.take()
            yield from self.fields("}", ":", depth)
        elif self._scan.next in ("[", "("):
            closing = {"[": "]", "(": ")"}[self._scan.next]
            yield from self._scan.take()
            self._give("[")
            yield from self._items(closing, partial(self._value, depth + 1))
            self._give("]")
        else:
            word = ""
            while self._scan.next not in (",", ")", "]", "}", ":"):
                word += self._scan.next
                if not self._scan.next:
                    raise OtherFormError
                yield from self._scan.take()
            self._give(_word(word.strip()))

    @property
    def _quotes(self) -> str:
        """Characters with which a text in quotes begins."""
        return self._quote[:1] + '"' if self._quote else "'\""

    def _quoted_text(self) -> Chars:
        quote, mark = self._scan.next, self._quote
        self._give('"')
        if mark and quote == mark[0]:
            yield from self._scan.expect(mark)
            yield from self._scan.text_until(mark, lambda text: self._give(quoted(text)))
            self._give('"')
            return
        yield from self._scan.take()
        while True:
            char = self._scan.next
            yield from self._scan.take()
            if not char:
                raise OtherFormError
            if char == quote and self._scan.next in ("", *BLANKS, ",", ")", "]", "}", ":", "="):
                break  # models write apostrophes without a backslash
            if char == "\\":
                char = yield from self._python_escape()
            self._give(quoted(char))
        self._give('"')

    def _python_escape(self) -> Generator[None, str, str]:
        char = self._scan.next
        yield from self._scan.take()
        if char not in _SIZES:
            return _ESCAPES.get(char, char if char and char in "\\'\"\n" else f"\\{char}")
        digits = ""
        while len(digits) < _SIZES[char] and self._scan.next and self._scan.next in "0123456789abcdefABCDEF":
            digits += self._scan.next
            yield from self._scan.take()
        code = int(digits or "0", 16)
        return chr(code) if len(digits) == _SIZES[char] and code < 0x110000 else f"\\{char}{digits}"


def quoted(text: str) -> str:
    """Text as it stands within quotation marks in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _word(word: str) -> str:
    """A bare word as JSON: a literal, a number, or text."""
    if word in LITERALS:
        return json.dumps(LITERALS[word])
    return word if NUMBER.fullmatch(word) else json.dumps(word, ensure_ascii=False)
