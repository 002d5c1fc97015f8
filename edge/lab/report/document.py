"""The document model of all reports, and its three forms: an HTML page, Markdown, and text for a terminal.

A report is a verdict, a few figures, commands to try, and sections of charts, facts and tables.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from edge.devices.output import check_writable
from edge.errors import InputError

if TYPE_CHECKING:
    from edge.lab.report.chart import Chart

KINDS = (".html", ".md", ".json")
NONE = "–"  # an unknown figure
_LEAST = (12, 6)  # least width, in characters, of a text column in a narrowed table: if possible, and always


@dataclass(frozen=True)
class Table:
    """A table of words and figures."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()  # explain the figures
    remarks: Sequence[str] = ()  # shown before the table
    left: int = 1  # number of columns with words; the others hold figures
    title: str = ""
    folded: bool = False  # a page shows it on request


@dataclass(frozen=True)
class Section:
    """A section; omitted if it is empty."""

    title: str
    tables: Sequence[Table] = ()
    remarks: Sequence[str] = ()
    charts: Sequence[Chart | None] = ()
    captions: Sequence[str] = ()  # of the charts
    facts: Sequence[tuple[str, str]] = ()
    commands: Sequence[tuple[str, str]] = ()  # what each is for, and the command


@dataclass(frozen=True)
class Report:
    """A report."""

    kind: str  # of report
    name: str  # heading of a page
    sections: Sequence[Section]
    title: str = ""  # heading of text
    about: str = ""  # line below the heading of a page
    limit: str = ""  # the conclusion in a word or two
    sentences: Sequence[str] = ()  # the conclusion in full
    figures: Sequence[tuple[str, str, str]] = ()  # name, value, how it is known
    note: str = ""
    advice: Sequence[tuple[str, str]] = ()  # reason and command


def check_place(path: Path) -> None:
    """Raise InputError for a file whose suffix is not in `KINDS`, or that cannot be written."""
    if path.suffix not in KINDS:
        raise InputError(f"{path}: what kind of report? Let its name end in {', '.join(KINDS)}")
    check_writable(path)


def markdown(report: Report) -> str:
    parts = [f"# {escaped(report.title)}"] if report.title else []
    parts += [f"**{escaped(each)}**" for each in report.sentences]
    parts.append("\n".join(f"- {escaped(f'{what}: {figure} ({known})')}" for what, figure, known in report.figures))
    if report.advice:
        parts += ["## What to try", _commands(report.advice)]
    for section in report.sections:
        if section.title and (section.tables or section.remarks or section.facts or section.commands):
            parts.append(f"## {escaped(section.title)}")
        parts += [_commands(section.commands), _bullets(section.remarks)]
        parts += [_bullets([f"{what}: {said}" for what, said in section.facts])]
        for each in section.tables:
            rows = [[escaped(cell) for cell in row] for row in each.rows]
            parts += [f"### {escaped(each.title)}" if each.title else ""]
            parts += [table([escaped(cell) for cell in each.headings], rows, each.left)]
            parts += [_bullets([*each.remarks, *each.notes])]
    return "\n\n".join(part for part in parts if part) + "\n"


def terminal(report: Report, width: int | None = None) -> str:
    """The report as text for a terminal of `width` characters."""
    parts = [report.title, *report.sentences]
    for section in report.sections:
        for each in section.tables:
            parts += [table(each.headings, each.rows, each.left, width), "\n".join([*each.remarks, *each.notes])]
        if section.commands:
            parts.append("\n".join(f"{what}: {command}" for what, command in section.commands))
        if section.remarks:
            parts.append(
                "\n".join([f"{section.title.lower()}:", *(f"- {' '.join(each.split())}" for each in section.remarks)])
            )
    if report.advice:
        longest = max(len(command) for _, command in report.advice)
        parts.append("\n".join(["to try:", *(f"  {command:{longest}}  {why}" for why, command in report.advice)]))
    return "\n\n".join(part for part in parts if part) + "\n"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, width: int | None = None) -> str:
    """A Markdown table with aligned columns; the first `left` columns are flush left.

    width: characters of a line; None: unlimited. In a narrow table the widest columns wrap; figures (columns flush
    right) stay whole, so that a table may remain too wide.
    """
    widths = [max(1, *(len(row[i]) for row in [headings, *rows])) for i in range(len(headings))]
    if width is not None:
        widths = _fitted(headings, rows, left, widths, width - 3 * len(widths) - 1)
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = [*_lines(headings, widths), rule, *(line for row in rows for line in _lines(row, widths))]
    cells = [[c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
             for row in lines]  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _fitted(
    headings: Sequence[str], rows: Sequence[Sequence[str]], left: int, widths: Sequence[int], room: int
) -> list[int]:
    """Column widths for this room, if possible: text columns shrink first, then words of headings wrap."""
    figures = [max((len(row[i]) for row in rows), default=1) for i in range(len(headings))]
    words = [max(len(word) for word in (*heading.split(), "")) for heading in headings]
    for text, word in ((_LEAST[0], True), (_LEAST[1], True), (_LEAST[1], False)):
        least = [text if i < left else max(figures[i], words[i] if word else 1) for i in range(len(headings))]
        narrow = _narrowed(widths, least, room)
        if sum(narrow) <= room:
            break
    return narrow


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Shrink the widest columns that may shrink."""
    narrow = list(widths)
    while sum(narrow) > room and (able := [i for i, w in enumerate(narrow) if w > max(1, least[i])]):
        narrow[max(able, key=lambda i: narrow[i])] -= 1
    return narrow


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """Wrap a row into lines where a cell is wider than its column."""
    cells = [[c] if len(c) <= w else textwrap.wrap(c, w) or [""] for c, w in zip(row, widths, strict=True)]
    return [list(line) for line in zip_longest(*cells, fillvalue="")]


def escaped(text: str) -> str:
    """Escape text as one line without Markdown markup, since names of models and devices are untrusted."""
    return "".join(f"\\{each}" if each in "|`*[<\\" else each for each in " ".join(text.split()))


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {escaped(each)}" for each in lines)


def _commands(commands: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"- {escaped(why)}: {_code(command)}" for why, command in commands)


def _code(text: str) -> str:
    """Inline code, with a fence longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{' '.join(text.split())}{space}{fence}"
