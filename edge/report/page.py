"""The one template of all reports: an HTML file that needs nothing else, readable on a phone, light and dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from edge.devices.output import check_writable
from edge.errors import InputError
from edge.report.style import STYLE
from edge.report.table import Section

KINDS = (".html", ".md", ".json")


def check_place(path: Path) -> None:
    """Raises InputError for names of other kinds, and where no such file can be written."""
    if path.suffix not in KINDS:
        raise InputError(f"{path}: what kind of report? Let its name end in {', '.join(KINDS)}")
    check_writable(path)


def page(kind: str, name: str, on: str, *parts: str) -> str:
    """A whole document. kind: of report. on: a line below the name. Those are text, parts are HTML, "" for none."""
    body = "\n".join(part for part in parts if part)
    said = f'<p class="on">{escape(on)}</p>\n' if on else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(name)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">edge · {escape(kind)}</p>
<h1>{escape(name)}</h1>
{said}</header>
{body}
</main>
</body>
</html>
"""


def verdict(chip: str, sentences: Iterable[str]) -> str:
    """What a report comes to."""
    said = "\n".join(f'<p class="sentence">{escape(each)}</p>' for each in sentences)
    return f'<section class="verdict"><p class="chip">{escape(chip)}</p>\n{said}</section>'


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """The figures that come first: what, figure, how it is known."""
    shown = "\n".join(
        f'<div class="card"><p class="what">{escape(what)}</p><p class="figure">{escape(figure)}</p>'
        f'<p class="known">{escape(known)}</p></div>'
        for what, figure, known in figures
    )
    return f'<section class="cards">\n{shown}\n</section>' if shown else ""


def advice(tips: Iterable[tuple[str, str]]) -> str:
    """Why, and a command."""
    items = "\n".join(f"<li>{escape(why)}<code>{escape(command)}</code></li>" for why, command in tips)
    return section("What to try", f'<ul class="advice">\n{items}\n</ul>' if items else "")


def section(title: str, *parts: str) -> str:
    """Parts under a title; nothing without any."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>\n{body}</section>" if body else ""


def table_html(shown: Section) -> str:
    """The table and its notes; on a phone every row is a card, and a figure's heading stands before it."""
    words = [" class=word" if index < shown.left else "" for index in range(len(shown.headings))]
    head = "".join(f"<th{word}>{escape(each)}</th>" for word, each in zip(words, shown.headings, strict=True))
    body = "\n".join(
        "<tr>"
        + "".join(
            f'<td{word} data-label="{escape(heading)}">{escape(cell if word else _unbroken(cell))}</td>'
            for word, heading, cell in zip(words, shown.headings, row, strict=True)
        )
        + "</tr>"
        for row in shown.rows
    )
    notes = folded("What this shows", notes_html(shown.notes)) if shown.notes else ""
    return (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n{notes_html(shown.remarks)}{notes}"
    )


def notes_html(notes: Iterable[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def folded(name: str, body: str) -> str:
    """There for whoever asks."""
    return f"<details><summary>{escape(name)}</summary>\n{body}</details>"


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    rows = "\n".join(f"<dt>{escape(what)}</dt><dd>{escape(said)}</dd>" for what, said in facts)
    return f"<dl>\n{rows}\n</dl>"


def _unbroken(figure: str) -> str:
    """With its unit in one line; `1 mJ → 2 mJ` and `2 ± 1` in two at most."""
    whole = figure.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}", " → ")
    return whole.replace("\N{NO-BREAK SPACE}±", " ±")
