"""A reader of JSON, character by character, which passes values on while it reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator

from edge.tools.scanner import BLANKS, LONGEST_NAME, Chars, OtherFormError, Scanner

DEEPEST = 64  # of nested values
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")


def read_value(scan: Scanner, give: Callable[[str], None], depth: int = 0) -> Chars:
    """Read a JSON value and pass it on piece by piece; escape control characters in its strings. Raises
    OtherFormError."""
    if depth > DEEPEST:
        raise OtherFormError
    if scan.next == '"':
        yield from _pass_text(scan, give)
    elif scan.next and scan.next in "{[":
        is_object, closing = scan.next == "{", {"{": "}", "[": "]"}[scan.next]
        give(scan.next)
        yield from scan.take()
        yield from _pass_blanks(scan, give)
        first = True
        while first is False or scan.next != closing:
            if is_object:
                if scan.next != '"':
                    raise OtherFormError
                yield from _pass_text(scan, give)
                yield from _pass_blanks(scan, give)
                yield from scan.expect(":")
                give(":")
                yield from _pass_blanks(scan, give)
            yield from read_value(scan, give, depth + 1)
            yield from _pass_blanks(scan, give)
            if scan.next != ",":
                break
            give(",")
            yield from scan.take()
            yield from _pass_blanks(scan, give)
            first = False
        yield from scan.expect(closing)
        give(closing)
    else:
        word = ""
        while scan.next and (scan.next.isalnum() or scan.next in "+-."):
            word += scan.next
            if len(word) > LONGEST_NAME:
                raise OtherFormError
            yield from scan.take()
        if not scan.next or not (word in ("true", "false", "null") or NUMBER.fullmatch(word)):
            raise OtherFormError
        give(word)


def read_text(scan: Scanner) -> Generator[None, str, str]:
    """Read a short string, such as a name. Raises OtherFormError."""
    if scan.next != '"':
        raise OtherFormError
    parts: list[str] = []
    size = 0

    def add(part: str) -> None:
        nonlocal size
        size += 1
        if size > LONGEST_NAME + 2:
            raise OtherFormError
        parts.append(part)

    yield from _pass_text(scan, add)
    return str(json.loads("".join(parts)))


def _pass_blanks(scan: Scanner, give: Callable[[str], None]) -> Chars:
    """Pass on spaces between the parts of JSON; leave out tabs and line breaks."""
    while scan.next and scan.next in BLANKS:
        if scan.next == " ":
            give(" ")
        yield from scan.take()


def _pass_text(scan: Scanner, give: Callable[[str], None]) -> Chars:
    give('"')
    yield from scan.take()
    while scan.next != '"':
        char = scan.next
        if not char:
            raise OtherFormError
        if char != "\\":
            give(json.dumps(char)[1:-1] if char < " " else char)
        yield from scan.take()
        if char == "\\":
            escaped = scan.next
            if not escaped or escaped not in '"\\/bfnrtu':
                raise OtherFormError
            yield from scan.take()
            if escaped == "u":
                for _ in range(4):
                    if not scan.next or scan.next not in "0123456789abcdefABCDEF":
                        raise OtherFormError
                    escaped += scan.next
                    yield from scan.take()
            give(f"\\{escaped}")
    yield from scan.take()
    give('"')
