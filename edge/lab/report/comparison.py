"""Report that compares two profiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from edge.budget import format_bytes
from edge.lab.profiling.compare import Compared, Comparison, Unit
from edge.lab.profiling.profile import SCHEMA
from edge.lab.report.document import NONE, Report, Section, Table
from edge.lab.report.figures import duration, joules, rate


def comparison_report(found: Comparison) -> Report:
    headings = ["what", found.first, found.second, "ratio", "second is"]
    rows = [
        [
            each.what, _figure(each.first, each.unit), _figure(each.second, each.unit),
            NONE if each.ratio is None else f"{each.ratio:.2f}", _judged(each),
        ]
        for each in found.rows
    ]  # fmt: skip
    remarks = [
        "Measured, unless it says estimated. Ratio: second / first. About the same: the spreads meet, from p10 to p90. "
        "Not judged: measured once or twice, which is no spread to judge by.",
        *(f"{each}." for each in found.notes),
    ]
    sections = [Section("", [Table(headings, rows, remarks=remarks)]), Section("Not the same", (), found.differences)]
    return Report("profiles compared", f"{found.second} against {found.first}", sections)


def comparison_json(found: Comparison) -> dict[str, Any]:
    return {"schema": SCHEMA, "kind": "edge profile comparison", **asdict(found)}


def _figure(value: float | None, unit: Unit) -> str:
    if value is None:
        return NONE
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


def _judged(each: Compared) -> str:
    if each.ratio is None:
        return "no match"
    if each.ratio == 1 and not each.sure:
        return "the same"
    if each.sure is None:
        return "not judged"
    if not each.sure:
        return "about the same"
    return "better" if (each.ratio > 1) == (each.better == "more") else "worse"
