"""Reports as files, with a self-contained HTML template for large screens and phones, in light and dark mode."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from edge.lab.report.chart import pictures, stylesheet
from edge.lab.report.document import Report, Section, Table, markdown


def render(kind: str, report: Report, data: Mapping[str, Any]) -> str:
    """The text of a report file: .html, .md or .json. data: the complete data, for .json."""
    if kind == ".json":
        return json.dumps(data, ensure_ascii=False, allow_nan=False) + "\n"
    return page(report) if kind == ".html" else markdown(report)


def page(report: Report) -> str:
    """The report as an HTML page. Escapes all texts."""
    about = f'<p class="on">{escape(report.about)}</p>\n' if report.about else ""
    parts = [_verdict(report), _figures(report), _notes([report.note] if report.note else ())]
    parts += [
        _section("What to try", _commands(report.advice)),
        *map(_body, report.sections),
    ]
    body = "\n".join(filter(None, parts))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(report.name)}</title>
<link rel="icon" href="data:,">
<style>{stylesheet("chart.css")}{stylesheet("page.css")}</style>
</head>
<body>
<main>
<header>
<p class="eyebrow">edge · {escape(report.kind)}</p>
<h1>{escape(report.name)}</h1>
{about}</header>
{body}
</main>
</body>
</html>
"""


def _verdict(report: Report) -> str:
    if not report.sentences:
        return ""
    said = "\n".join(f'<p class="sentence">{escape(each)}</p>' for each in report.sentences)
    return f'<section class="verdict"><p class="chip">{escape(report.limit)}</p>\n{said}</section>'


def _figures(report: Report) -> str:
    shown = "\n".join(
        f'<div class="card"><p class="what">{escape(what)}</p><p class="figure">{escape(figure)}</p>'
        f'<p class="known">{escape(known)}</p></div>'
        for what, figure, known in report.figures
    )
    return f'<section class="cards">\n{shown}\n</section>' if shown else ""


def _body(section: Section) -> str:
    drawn = pictures(section.charts)
    facts = "".join(f"<dt>{escape(what)}</dt><dd>{escape(said)}</dd>\n" for what, said in section.facts)
    notes = _notes([*(section.captions if drawn else ()), *section.remarks])
    tables = "".join(map(_table, section.tables))
    shown = [drawn, notes, f"<dl>{facts}</dl>" if facts else "", tables, _commands(section.commands)]
    return _section(section.title, "".join(shown))


def _commands(commands: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<li>{escape(why)}<code>{escape(command)}</code></li>\n" for why, command in commands)
    return f'<ul class="advice">\n{items}</ul>' if items else ""


def _section(title: str, body: str) -> str:
    heading = f"<h2>{escape(title)}</h2>\n" if title else ""
    return f"<section>{heading}{body}</section>" if body else ""


def _table(shown: Table) -> str:
    """A table and its notes; on a phone, each row becomes a card with headings beside the figures."""
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
    notes = _folded("What this shows", _notes(shown.notes)) if shown.notes else ""
    made = (
        f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody></table></div>\n{_notes(shown.remarks)}{notes}"
    )
    if shown.folded:
        return _folded(shown.title or "All figures", made)
    return f"<h3>{escape(shown.title)}</h3>\n{made}" if shown.title else made


def _notes(notes: Iterable[str]) -> str:
    return "".join(f'<p class="note">{escape(note)}</p>\n' for note in notes)


def _folded(name: str, body: str) -> str:
    return f"<details><summary>{escape(name)}</summary>\n{body}</details>"


def _unbroken(figure: str) -> str:
    """Keep a figure and its unit on one line; `1 mJ → 2 mJ` and `2 ± 1` may break once."""
    whole = figure.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}→\N{NO-BREAK SPACE}", " → ")
    return whole.replace("\N{NO-BREAK SPACE}±", " ±")
