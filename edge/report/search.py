"""Report on a search: the settings that no other surpasses, with their command lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from edge.budget import format_bytes, format_joules
from edge.devices.power.base import certainty
from edge.quality.matrix import FULL
from edge.report.chart import Axis, Chart, colour
from edge.report.document import NONE, Report, Section, Table
from edge.report.figures import rate
from edge.searching.front import STEP
from edge.searching.search import SCHEMA, Found, Point

_SHAPES = ("circle", "square", "diamond", "triangle", "block")
_LEAST_KL = 1e-3  # smaller losses are drawn there: the axis is logarithmic
_ROOM = 1.08  # of axes, beyond the outermost mark


def search_report(found: Found) -> Report:
    """The report, for all of its forms."""
    points, names = found.points, [f"{number}" for number in range(1, len(found.points) + 1)]
    picks = _picks(points)
    said = [f"{what}: {number}, {_title(points[number - 1])}." for what, number, _ in picks]
    models = " or ".join(dict.fromkeys(each.candidate.weights.model for each in points))
    return Report(
        kind="search",
        name=f"{models} on {found.device}",
        title=f"Settings of {models} on {found.device} that no other surpasses",
        about=f"{found.tokens:,} tokens of prompt and answer, losses against {found.reference}",
        limit=f"{len(points)} of {found.fitting} settings",
        sentences=said,
        figures=[(what, figure, _title(points[number - 1])) for what, number, figure in picks],
        advice=[(f"{number}: {_title(each)}", each.command) for number, each in zip(names, points, strict=True)],
        sections=[
            Section("The front", charts=_charts(points), captions=["Colours tell weight types, shapes KV settings."]),
            Section("All settings of the front", [_table(found)]),
            Section("Not searched", remarks=[f"{count} settings: {reason}" for reason, count in found.refused]),
            Section("Not measured", remarks=[f"{trial}: {reason}" for trial, reason in found.failed]),
        ],
    )


def search_json(found: Found) -> dict[str, Any]:
    """Everything, for JSON. Bytes, joules and tokens per second."""
    return {"schema": SCHEMA, **asdict(found)}


def _table(found: Found) -> Table:
    rows = []
    for number, each in enumerate(found.points, start=1):
        candidate, quality = each.candidate, each.quality
        rows.append([
            str(number), candidate.weights.label, _kv(each), str(candidate.threads),
            f"{quality.kl:.4f} ± {quality.kl_stderr:.4f}", f"{quality.ratio:.3f}", _number(_tok_s(each), rate),
            _number(_joules(each), format_joules), format_bytes(candidate.memory),
        ])  # fmt: skip
    heads = ["", "weights", "KV cache", "threads", "KL", "perplexity ×", "tok/s", "per token", "memory"]
    return Table(heads, rows, _notes(found), left=3)


def _notes(found: Found) -> list[str]:
    timed, first = found.points[0].speed, found.points[0].candidate
    notes = [
        f"KL and perplexity: measured on {found.points[0].quality.tokens:,} predictions of {found.text}, against "
        f"{found.reference}. Memory: predicted peak of the process (estimated)."
    ]
    if timed:
        notes.append(f"tok/s: measured here, once; joules: {certainty(timed.energy_kind)}.")
    else:
        sources = [each.source for each in (first.tok_s, first.joules) if each]
        notes.append(f"tok/s in the middle of the answer, and its joules: {', '.join(sources) or 'not predicted'}.")
    if found.unpredicted:
        notes.append(f"Nothing predicts {' and '.join(found.unpredicted)}: they did not count in the search.")
    notes.append(
        f"{len(found.points)} of {found.fitting} settings that fit, which no other surpasses in all figures: "
        f"differences below about {STEP - 1:.0%} count as none. {found.measured} trials, {found.remembered} remembered"
        + (f"; the largest took {format_bytes(found.trial_peak)} (measured)." if found.trial_peak else ".")
    )
    return notes


def _picks(points: Sequence[Point]) -> list[tuple[str, int, str]]:
    """What each pick is best at, its number, its figure; of equals, that with the least loss."""

    def best(worth: Callable[[Point], float | None]) -> int:
        return min(range(len(points)), key=lambda index: (worth(points[index]) or 0.0, index))

    found = [("Least loss", at := best(lambda each: each.quality.kl), f"{points[at].quality.kl:.4f} nats")]
    if all(_tok_s(each) for each in points):
        found.append(
            ("Fastest", at := best(lambda each: -(_tok_s(each) or 0)), f"{_number(_tok_s(points[at]), rate)} tok/s")
        )
    if all(_joules(each) for each in points):
        found.append(("Fewest joules", at := best(_joules), f"{_number(_joules(points[at]), format_joules)} per token"))
    found.append(
        ("Least memory", at := best(lambda each: each.candidate.memory), format_bytes(points[at].candidate.memory))
    )
    return [(what, index + 1, figure) for what, index, figure in found]


def _charts(points: Sequence[Point]) -> list[Chart | None]:
    return [
        _chart(points, "Loss and memory", "memory, MiB", lambda each: each.candidate.memory / (1 << 20)),
        _chart(points, "Loss and speed", "tok/s", _tok_s),
        _chart(points, "Loss and energy", "mJ per token", lambda each: 1e3 * (_joules(each) or 0.0)),
    ]


def _chart(points: Sequence[Point], title: str, label: str, figure: Callable[[Point], float | None]) -> Chart | None:
    """A mark for each point; None where a figure is unknown."""
    across = [figure(each) for each in points]
    if not all(across):
        return None
    shown = [(each or 0.0, max(_LEAST_KL, point.quality.kl)) for each, point in zip(across, points, strict=True)]
    xs, ys = zip(*shown, strict=True)
    x = Axis(min(xs) / _ROOM, max(xs) * _ROOM, label)
    y = Axis(min(ys) / _ROOM, max(ys) * _ROOM, log=True, ticks=_decades(min(ys), max(ys)))
    chart = Chart(f"{title}: KL in nats, by {label}", f"{title}: KL, nats", x, y)
    types = list(dict.fromkeys(each.candidate.weights.label for each in points))
    caches = list(dict.fromkeys(_kv(each) for each in points))
    for number, (each, (at, loss)) in enumerate(zip(points, shown, strict=True), start=1):
        paint = colour(types.index(each.candidate.weights.label))
        shape = _SHAPES[caches.index(_kv(each)) % len(_SHAPES)]
        chart.mark(at, loss, paint, shape, f"{number}: {_title(each)}: KL {each.quality.kl:.4f}, {at:.4g} {label}")
    for number, name in enumerate(types):
        chart.key(name, colour(number))
    return chart


def _decades(low: float, high: float) -> list[tuple[float, str]]:
    marks = [digit * 10.0**power for power in range(-3, 2) for digit in (1, 2, 5)]
    return [(each, f"{each:g}") for each in marks if low / _ROOM <= each <= high * _ROOM]


def _title(point: Point) -> str:
    threads = point.candidate.threads
    return f"{point.candidate.weights.label}, {_kv(point)}, {threads} {'thread' if threads == 1 else 'threads'}"


def _kv(point: Point) -> str:
    cell = point.candidate.cell
    rows = "" if cell.policy == FULL else f", {point.candidate.rows:,} rows"
    return f"{cell.policy} {cell.kv_dtype}{rows}"


def _tok_s(point: Point) -> float | None:
    if point.speed:
        return point.speed.tok_s
    return point.candidate.tok_s.value if point.candidate.tok_s else None


def _joules(point: Point) -> float | None:
    if point.speed:
        return point.speed.joules
    return point.candidate.joules.value if point.candidate.joules else None


def _number(value: float | None, form: Callable[[float], str]) -> str:
    return NONE if value is None else form(value)
