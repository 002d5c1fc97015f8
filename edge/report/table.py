"""Tables for people."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

_LEAST = 12  # characters that a column of text is left when a table has to become narrower


@dataclass(frozen=True)
class Section:
    """The first `left` columns are words. notes: what the figures are. remarks: what one should see at once."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    remarks: Sequence[str] = ()
    left: int = 1


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, width: int | None = None) -> str:
    """A Markdown table with aligned columns; the first `left` columns are flush left.

    width: characters of a line, None for any number. Where they are too few, the widest columns become narrower and
    their cells several lines; figures (columns that are flush right) stay whole, so that a table may remain too wide.
    """
    widths = [max(1, *(len(row[i]) for row in [headings, *rows])) for i in range(len(headings))]
    if width is not None:
        least = [_LEAST if i < left else max((len(row[i]) for row in rows), default=1) for i in range(len(headings))]
        widths = _narrowed(widths, least, width - 3 * len(widths) - 1)
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    lines = [*_lines(headings, widths), rule, *(line for row in rows for line in _lines(row, widths))]
    cells = [[c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
             for row in lines]  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)


def _narrowed(widths: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """The widest of those that may become narrower first."""
    narrow = list(widths)
    while sum(narrow) > room and (able := [i for i, w in enumerate(narrow) if w > max(1, least[i])]):
        narrow[max(able, key=lambda i: narrow[i])] -= 1
    return narrow


def _lines(row: Sequence[str], widths: Sequence[int]) -> list[list[str]]:
    """A row as one line, or more where a cell is wider than its column."""
    cells = [[c] if len(c) <= w else textwrap.wrap(c, w) or [""] for c, w in zip(row, widths, strict=True)]
    return [list(line) for line in zip_longest(*cells, fillvalue="")]
