"""Tables for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table with aligned columns; the first `left` columns are flush left."""
    widths = [max(len(row[i]) for row in [headings, *rows]) for i in range(len(headings))]
    rule = ["-" * w if i < left else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    cells = [[c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
             for row in [headings, rule, *rows]]  # fmt: skip
    return "\n".join("| " + " | ".join(row) + " |" for row in cells)
