"""The quality of KV settings as a document: JSON, Markdown, or a page that says what to choose."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from edge.report.chart import INK, Axis, Chart, colour, pictures
from edge.report.kv import Row, cells_of, notes_of, reasons_of, to_json
from edge.report.kv_choice import Choice, choices, title, told
from edge.report.page import advice, cards, notes_html, page, section, table_html, verdict
from edge.report.table import Section, table

_MIB = 1 << 20
_PANELS = {
    "ratio": "Perplexity × full",
    "known": "Digits found, question known",
    "streamed": "Digits found, streamed",
    "repeat": "Perplexity of a repeated segment",
}
_SHAPES = ("circle", "square", "diamond", "triangle")
_HIGHEST = 1.4  # ratios above are said and not drawn: controls would hide the others
_INCOMPLETE = "This run was interrupted: some cells are missing."


def document(kind: str, rows: Sequence[Row], settings: dict[str, Any], model: str, *, complete: bool) -> str:
    """The text of a file of this kind: .html, .md or .json. model: as the user named it."""
    if kind == ".json":
        return json.dumps(to_json(rows, settings, complete=complete), ensure_ascii=False, allow_nan=False) + "\n"
    shown = _section(rows, settings)
    if kind == ".html":
        return _html(rows, shown, settings, model, complete=complete)
    parts = [f"# KV cache quality: {settings['model']}", table(shown.headings, shown.rows, left=shown.left)]
    parts += ["" if complete else _INCOMPLETE]
    parts += ["\n".join(f"- {' '.join(each.split())}" for each in reasons_of(rows))]
    parts += ["\n".join(f"- {note}" for note in shown.notes)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _html(rows: Sequence[Row], shown: Section, settings: dict[str, Any], model: str, *, complete: bool) -> str:
    found = choices(rows)
    engine, texts = settings["backend"], ", ".join(each["name"] for each in settings["documents"])
    names = list(dict.fromkeys(title(each.row) for each in found))
    picks = names if len(names) == 1 else [f"{title(each.row)} at {each.size}" for each in found]
    said = [*(each.sentence for each in found)] or ["Nothing was measured that says what to choose."]
    drawn = [_panel(name, rows) for name in _PANELS]
    beyond = [
        f"{title(row)} at {row.cell.size}: {row.figures['ratio'].value:.2f}"
        for row in rows if "ratio" in row.figures and row.figures["ratio"].value > _HIGHEST
    ]  # fmt: skip
    notes = ["The line across a mark: its standard error. The upright line: the full cache."]
    notes += [f"Perplexity beyond the picture: {', '.join(beyond)}."] if beyond else []
    return page(
        "KV cache quality", model, f"{settings['model']}, {engine} engine, {texts}",
        verdict(f"Choose: {', '.join(picks)}" if picks else "No choice", said if complete else [_INCOMPLETE, *said]),
        cards(_figures(rows, found)), advice(_commands(found, model)),
        section("Quality", pictures(drawn), notes_html(notes)) if any(drawn) else "",
        section("All figures", table_html(shown)), section("Not measured", notes_html(reasons_of(rows))),
    )  # fmt: skip


def _section(rows: Sequence[Row], settings: dict[str, Any]) -> Section:
    """The table, with what its columns mean and what one has to know to measure the same again."""
    headings, lines = cells_of(rows)
    documents = ", ".join(f"{each['name']} ({each['tokens']:,} tokens)" for each in settings["documents"])
    versions = ", ".join(f"{name} {version}" for name, version in settings["versions"].items())
    again = f"texts: {documents}; seed {settings['seed']}; engine {settings['backend']}; {versions}"
    return Section("All figures", headings, lines, [*notes_of(rows, settings), again], left=2)


def _figures(rows: Sequence[Row], found: Sequence[Choice]) -> list[tuple[str, str, str]]:
    full = rows[0]
    shown = []
    if full.nbytes and "perplexity" in full.figures:
        perplexity = full.figures["perplexity"].value
        shown.append(("full cache", f"{full.nbytes / _MIB:.3g} MiB", f"{full.kv_dtype}, perplexity {perplexity:.4g}"))
    for each in found:
        if "ratio" in each.row.figures:
            first, _, error = told(each.row, "ratio").partition(" ")
            known = f"of perplexity, {error}" if error else "of perplexity"
            shown.append((f"{title(each.row)}, {each.size}", first, known))
    return shown


def _commands(found: Sequence[Choice], model: str) -> list[tuple[str, str]]:
    commands = []
    for each in found:
        cell, size = each.row.cell, ["--max-kv-size", str(each.row.cell.max_kv_size)]
        if cell.kv_memory:
            whole = f"{cell.kv_memory / _MIB}MiB".replace(".0MiB", "MiB")
            size = ["--kv-memory", whole if cell.kv_memory % 1024 == 0 else str(cell.kv_memory)]
        dtype = ["--kv-dtype", cell.kv_dtype] if cell.kv_dtype else []
        command = shlex.join(["edge", "run", model, "--kv-policy", cell.policy, *dtype, *size])
        commands.append((f"{title(each.row)} at {each.size}", command))
    return commands


def _panel(name: str, rows: Sequence[Row]) -> Chart | None:
    """A line for each policy and dtype, the best first, with a mark for each size."""
    points = [(row, row.figures[name]) for row in rows if row.cell.size and name in row.figures]
    points = [(row, figure) for row, figure in points if name != "ratio" or figure.value <= _HIGHEST]
    if not points:
        return None
    sizes, lines = list(dict.fromkeys(row.cell.size for row, _ in points)), _ranked(rows)
    full = (rows[0].figures.get(name) or points[0][1]).value
    spans = [(figure.value - (figure.stderr or 0), figure.value + (figure.stderr or 0)) for _, figure in points]
    low, high = min(full, *(each for each, _ in spans)), max(full, *(each for _, each in spans))
    if name == "repeat":
        x = Axis(0.9 * max(low, 1.0), 1.1 * min(high, 1e300), "← better", log=True)
    else:
        room = 0.04 * (high - low) or 0.01
        x = Axis(low - room, high + room, "← better") if name == "ratio" else Axis(0, 1, "better →")
    height = 24 + 7 * len(sizes)  # of a line: its name, and below it the marks
    chart = Chart(_PANELS[name], _PANELS[name], x, Axis(len(lines), 0, ticks=()), height * len(lines))
    for top, line in enumerate(lines):
        chart.across(top, "var(--line)")
        chart.word(x.low, top, line, dx=2, dy=15)
        chart.line([(full, top + 17 / height), (full, top + 1)], INK, width=1.2)
    for (row, figure), (least, most) in zip(points, spans, strict=True):
        size = sizes.index(row.cell.size)
        y = lines.index(title(row)) + (23 + 7 * size) / height
        chart.line([(max(least, x.low), y), (min(most, x.high), y)], colour(size), width=1.6)
        chart.mark(
            figure.value, y, colour(size), _SHAPES[size % 4], f"{title(row)}, {row.cell.size}: {figure.value:.4g}"
        )
    for number, each in enumerate(sizes):
        chart.key(each, colour(number), _SHAPES[number % 4])
    return chart


def _ranked(rows: Sequence[Row]) -> list[str]:
    """Policies and dtypes that are drawn, those that lose least first."""
    shown = [row for row in rows if row.cell.size and row.figures]
    shown.sort(key=lambda row: row.figures["ratio"].value if "ratio" in row.figures else 0.0)
    return list(dict.fromkeys(map(title, shown)))
