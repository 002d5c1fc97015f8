"""Two profiles side by side, as a table: Markdown, JSON, or an HTML file that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict

from edge.budget import format_bytes
from edge.profiling.compare import Compared, Comparison, Unit
from edge.profiling.profile import SCHEMA
from edge.report.figures import duration, joules, rate
from edge.report.page import notes_html, page, section, table_html
from edge.report.profile_text import marked
from edge.report.table import Section, table


def document(found: Comparison, kind: str) -> str:
    """The text of a file of this kind: .md, .json or .html."""
    if kind == ".json":
        said = {"schema": SCHEMA, "kind": "edge profile comparison", **asdict(found)}
        return json.dumps(said, ensure_ascii=False, allow_nan=False) + "\n"
    if kind == ".html":
        title = f"{found.second} against {found.first}"
        differences = section("Not the same", notes_html(found.differences))
        return page("profiles compared", title, "", f"<section>{table_html(_section(found))}</section>", differences)
    return _text(found, marked)


def comparison(found: Comparison, width: int | None = None) -> str:
    """For a terminal of `width` characters."""
    return _text(found, lambda said: " ".join(said.split()), width)


def _text(found: Comparison, written: Callable[[str], str], width: int | None = None) -> str:
    """written: what is done to each piece, so that its characters are no more than that."""
    shown = _section(found)
    rows = [[written(cell) for cell in row] for row in shown.rows]
    headings = [written(each) for each in shown.headings]
    parts = [table(headings, rows, width=width), "\n".join(map(written, shown.remarks))]
    if found.differences:
        parts.append("not the same:\n" + "\n".join(f"- {written(each)}" for each in found.differences))
    return "\n\n".join(parts) + "\n"


def _section(found: Comparison) -> Section:
    rows = [
        [each.what, figure(each.first, each.unit), figure(each.second, each.unit), _ratio(each), _judged(each)]
        for each in found.rows
    ]
    remarks = [
        "Measured, unless it says estimated. Ratio: second / first. About the same: the spreads meet, from p10 to p90. "
        "Not judged: measured once or twice, which is no spread to judge by.",
        *(f"{each}." for each in found.notes),
    ]
    return Section("Compared", ["what", found.first, found.second, "ratio", "second is"], rows, [], remarks)


def figure(value: float | None, unit: Unit) -> str:
    """For people."""
    if value is None:
        return "–"
    match unit:
        case "s":
            return duration(value)
        case "B":
            return format_bytes(value)
        case "J":
            return joules(value)
        case "B/s":
            return f"{value / 1e9:.3g} GB/s"
        case "flop/s":
            return f"{value / 1e9:.3g} GFLOP/s"
        case "tok/s":
            return f"{rate(value)} tok/s"
    return f"{value:.2f}"


def _ratio(each: Compared) -> str:
    return "–" if each.ratio is None else f"{each.ratio:.2f}"


def _judged(each: Compared) -> str:
    if each.ratio is None:
        return "no match"
    if each.sure is None:
        return "not judged" if each.ratio != 1 else "the same"
    if not each.sure:
        return "about the same" if each.ratio != 1 else "the same"
    return "better" if (each.ratio > 1) == (each.better == "more") else "worse"
