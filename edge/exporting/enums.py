"""The enums of edge.h in every language: statuses, roles, reasons for the end of answers, levels of memory.

The files lie in the repository as apps and their tools read them; each part between `generated: NAME` and `end` is
written by `python -m edge.exporting.enums`, and a test compares it.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path

_HERE = Path(__file__).parent


class Status(IntEnum):
    OK = 0
    BAD_ARGUMENT = -1
    BAD_FILE = -2
    UNSUPPORTED = -3
    NO_MEMORY = -4
    BUSY = -5
    FULL = -6
    FAILED = -7


class Role(IntEnum):
    SYSTEM, USER, ASSISTANT, RAW, IDS = range(5)


class Finish(IntEnum):
    """Why an answer ended, in the words of `edge.run.report.StopReason`; GOING: it has not."""

    GOING, EOS, STOP, LENGTH, CAPACITY, INTERRUPTED, TIME, ENERGY, POWER, THERMAL, MEMORY = range(11)


class Trim(IntEnum):
    SOFT, HALF, ALL = range(3)


_ROLES_OF_TEXT = [each for each in Role if each != Role.IDS]  # ids have functions of their own
_ABOUT: dict[type[IntEnum], dict[int, str]] = {
    Status: {
        Status.BAD_ARGUMENT: "A value that the function does not take, or a call out of order.",
        Status.BAD_FILE: "model.edge or a saved state is unreadable, damaged, cut short, or of another version.",
        Status.UNSUPPORTED: "This CPU, model or policy cannot do that.",
        Status.BUSY: "Another thread or process uses the session, or sessions of the model are open.",
        Status.FULL: "The text has more tokens than there are free rows, and the policy evicts none.",
        Status.FAILED: "The model computed no number (NaN).",
    },
    Role: {
        Role.SYSTEM: "Before the first turn. Its KV rows stay when others are evicted, as far as the plan has room.",
        Role.USER: "A turn. Its text never becomes a control token.",
        Role.ASSISTANT: "An answer from an earlier conversation.",
        Role.RAW: "Text without the chat template, in which control tokens are recognized.",
        Role.IDS: "Token ids, int32_t; count is their number.",
    },
    Finish: {},
    Trim: {Trim.SOFT: "What costs nothing.", Trim.HALF: "Half of what can be spared.", Trim.ALL: "All of it."},
}


def _c(kind: type[IntEnum]) -> str:
    prefix = "EDGE_" + "TRIM_" * (kind is Trim)
    if kind is Finish:
        return _list((f"{prefix}{each.name}" for each in kind), 4)
    lines = []
    for each in kind:
        about = f" /* {_ABOUT[kind][each]} */" if each in _ABOUT[kind] else ""
        lines.append(f"    {prefix}{each.name} = {each.value},{about}")
    return "\n".join(lines)


def _kotlin(kind: type[IntEnum]) -> str:
    if kind is Role:
        return "\n".join(f"    /** {_ABOUT[Role][each]} */\n    {each.name}," for each in _ROLES_OF_TEXT)
    if kind is Status:
        return _list((f"{each.name}({each.value})" for each in Status if each.value), 4)
    return _list((each.name for each in kind), 4)


def _swift(kind: type[IntEnum]) -> str:
    if kind is Role:
        return "\n".join(f"    /// {_ABOUT[Role][each]}\n    case {each.name.lower()}" for each in _ROLES_OF_TEXT)
    if kind is Status:
        return _list((f"{_camel(each.name)} = {each.value}" for each in Status if each.value), 8, "case ")
    return _list((each.name.lower() for each in kind), 4, "case ")


def _script(kind: type[IntEnum]) -> str:
    if kind is Status:
        return _list((f"[{each.value}]: {_quoted(each)}" for each in Status if each.value), 2)
    if kind is Role:
        return _list((f"{each.name.lower()}: {each.value}" for each in Role), 2)
    return _list(map(_quoted, kind), 2)


def _types(kind: type[IntEnum]) -> str:
    return "  finish: " + " | ".join(_quoted(each) for each in kind if each.value) + ";"


FILES: dict[str, Callable[[type[IntEnum]], str]] = {
    "runtime/edge.h": _c,
    "kotlin/src/edge/runtime/EdgeOptions.kt": _kotlin,
    "kotlin/src/edge/runtime/Native.kt": _kotlin,
    "swift/Sources/EdgeKit/EdgeOptions.swift": _swift,
    "web/package/module.js": _script,
    "web/package/index.d.ts": _types,
}
_KINDS: dict[str, type[IntEnum]] = {kind.__name__: kind for kind in (Status, Role, Finish, Trim)}
_PART = re.compile(r"(^ *(?://|/\*) generated: (\w+)[^\n]*\n).*?(^ *(?://|/\*) end\b)", re.MULTILINE | re.DOTALL)


def generated(name: str) -> str:
    """A file of FILES with its generated parts as they should be."""
    write = FILES[name]

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}{write(_KINDS[match[2]])}\n{match[3]}"

    return _PART.sub(part, (_HERE / name).read_text(encoding="utf-8"))


def _list(members: Iterable[str], indent: int, before: str = "") -> str:
    """Members on lines of at most 120 characters, none of them broken."""
    margin, whole = " " * indent, (each.replace(" ", "\0") for each in members)
    filled = textwrap.fill(
        ", ".join(whole), 120, initial_indent=margin + before, subsequent_indent=margin, break_on_hyphens=False
    )
    return filled.replace("\0", " ")


def _quoted(each: IntEnum) -> str:
    return f'"{each.name.lower().replace("_", "-")}"'


def _camel(name: str) -> str:
    first, *others = name.lower().split("_")
    return first + "".join(map(str.capitalize, others))


if __name__ == "__main__":
    for each in FILES:
        (_HERE / each).write_text(generated(each), encoding="utf-8")
