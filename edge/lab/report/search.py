"""Report on a search: the Pareto-optimal settings, with their command lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from edge.budget import format_bytes, format_joules
from edge.devices.power.base import certainty
from edge.lab.quality.matrix import FULL
from edge.lab.report.chart import Axis, Chart, colour
from edge.lab.report.document import NONE, Report, Section, Table
from edge.lab.report.figures import rate
from edge.lab.searching.front import STEP
from edge.lab.searching.search import SAME_KL, SCHEMA, Found, Point

_ROOM = 1.08  # of axes, beyond the outermost mark


def search_report(found: Found) -> Report:
    """The report, for all of its forms."""
    points, picks = found.points, _picks(found.points)
    models = " or ".join(dict.fromkeys(each.candidate.weights.model for each in points))
    are = "is" if len(points) == 1 else "are"
    tries: dict[int, list[str]] = {}
    for pick in picks:
        tries.setdefault(pick.number, []).append(pick.best_at)
    commands = [(str(number), each.command) for number, each in enumerate(points, start=1)]
    return Report(
        kind="search",
        name=f"{models} on {found.device}",
        title=f"Search: {models} on {found.device}",
        about=f"{found.tokens:,} tokens of prompt and answer, losses against {found.reference}",
        limit=f"{len(points)} of {found.fitting} settings",
        sentences=[f"{len(points)} of {found.fitting} settings that fit {are} surpassed by no other."],
        figures=[
            (each.best_at, each.figure, f"{each.known}; {each.number}: {_title(points[each.number - 1])}")
            for each in picks
        ],
        advice=[(f"{number}: {', '.join(best).lower()}", points[number - 1].command) for number, best in tries.items()],
        sections=[
            Section("The front", [_table(found)], charts=_charts(points), captions=["Colours tell weight types."]),
            Section("Command lines", commands=commands),
            Section(
                "Not searched", remarks=[f"{count} of weights × KV caches: {reason}" for reason, count in found.refused]
            ),
            Section("Not measured", remarks=[f"{trial}: {reason}" for trial, reason in found.failed]),
        ],
    )


def search_json(found: Found) -> dict[str, Any]:
    """All results as JSON data. Sizes are bytes, energy is joules, speeds are tokens per second."""
    return {"schema": SCHEMA, **asdict(found)}


def _table(found: Found) -> Table:
    rows, speeds, then = [], [("first_tok_s", "tok/s"), ("first_joules", "per token")], _then(found.points)
    if then:
        speeds = [speeds[0], ("tok_s", f"tok/s{then}"), speeds[1], ("joules", f"per token{then}")]
    for number, each in enumerate(found.points, start=1):
        candidate, quality, figures = each.candidate, each.quality, _figures(each)
        rows.append([
            str(number), candidate.weights.label, _kv(each), str(candidate.threads),
            f"{figures['kl']} ± {quality.kl_stderr:.4f}", f"{quality.ratio:.3f}",
            *(figures[what] for what, _ in speeds), figures["memory"],
        ])  # fmt: skip
    heads = ["", "weights", "KV cache", "threads", "KL", "perplexity ×", *(head for _, head in speeds), "memory"]
    return Table(heads, rows, _notes(found), left=3)


def _notes(found: Found) -> list[str]:
    timed, first = found.points[0].speed, found.points[0].candidate
    notes = [
        f"KL and perplexity: measured on {found.points[0].quality.tokens:,} predictions of {found.text}, against "
        f"{found.reference}. Memory: predicted peak of the process (estimated)."
    ]
    if timed:
        where = f"at {found.on}, by kits" if found.on else "here"
        notes.append(f"tok/s: measured {where}, once; joules: {certainty(timed.energy_kind)}.")
    else:
        speed, joules = first.tok_s, first.joules
        sources = [f"{speed.source} ({speed.known})" if speed.known else speed.source] if speed else []
        sources += [joules.source] if joules else []
        notes.append(f"tok/s in the middle of the answer, and its joules: {', '.join(sources) or 'not predicted'}.")
        notes += found.basis
    if then := _then(found.points):
        how = dict.fromkeys(each.candidate.sustained.tok_s.source for each in found.points if each.candidate.sustained)
        notes.append(
            f"Speed and joules{then} without a pause rank: {found.device} throttles. tok/s then: {'; '.join(how)}."
        )
    if found.unpredicted:
        notes.append(f"Nothing predicts {' and '.join(found.unpredicted)}: they did not count in the search.")
    notes.append(
        f"Differences below about {STEP - 1:.0%} count as none. {found.measured} trials, {found.remembered} remembered"
        + (f"; the largest took {format_bytes(found.trial_peak)} (measured)." if found.trial_peak else ".")
    )
    return notes


@dataclass(frozen=True)
class _Pick:
    """The best point for one figure; of equals, the one with the least loss."""

    best_at: str
    number: int  # of the point, from 1
    figure: str
    known: str  # measured or estimated


def _picks(points: Sequence[Point]) -> list[_Pick]:
    found: list[_Pick] = []

    def pick(best_at: str, worth: Callable[[Point], float | None], figure: str, known: str) -> None:
        worths = [worth(each) for each in points]
        if all(each is not None for each in worths):
            at = min(range(len(points)), key=lambda index: (worths[index] or 0.0, index))
            found.append(_Pick(best_at, at + 1, figure.format(_figures(points[at])), known))

    timed, then = points[0].speed, _then(points)
    speed = "measured" if timed and not then else "estimated"
    pick("Least loss", lambda each: each.quality.kl, "{0[kl]} nats", "measured")
    pick("Fastest", _token_s, "{0[tok_s]} tok/s" + then, speed)
    known = certainty(timed.energy_kind) if timed and not then else "estimated"
    pick("Fewest joules", lambda each: each.ranking_joules, "{0[joules]} per token" + then, known)
    pick("Least memory", lambda each: each.candidate.memory, "{0[memory]}", "estimated")
    return found


def _figures(point: Point) -> dict[str, str]:
    return {
        "kl": f"{point.quality.kl:.4f}",
        "first_tok_s": _number(point.tok_s, rate),
        "first_joules": _number(point.joules, format_joules),
        "tok_s": _number(point.ranking_tok_s, rate),
        "joules": _number(point.ranking_joules, format_joules),
        "memory": format_bytes(point.candidate.memory),
    }


def _charts(points: Sequence[Point]) -> list[Chart | None]:
    then = _then(points)
    return [
        _chart(points, "Loss and memory", "memory, MiB", lambda each: each.candidate.memory / (1 << 20)),
        _chart(points, "Loss and speed", f"tok/s{then}", lambda each: each.ranking_tok_s),
        _chart(points, "Loss and energy", f"mJ per token{then}", lambda each: 1e3 * (each.ranking_joules or 0.0)),
    ]


def _chart(points: Sequence[Point], title: str, label: str, figure: Callable[[Point], float | None]) -> Chart | None:
    """A mark for each point; None where a figure is unknown."""
    across = [figure(each) for each in points]
    if not all(across):
        return None
    shown = [(each or 0.0, max(SAME_KL, point.quality.kl)) for each, point in zip(across, points, strict=True)]
    xs, ys = zip(*shown, strict=True)
    x = Axis(min(xs) / _ROOM, max(xs) * _ROOM, label)
    y = Axis(min(ys) / _ROOM, max(ys) * _ROOM, log=True, ticks=_decades(min(ys), max(ys)))
    chart = Chart(f"{title}: KL in nats, by {label}", f"{title}: KL, nats", x, y)
    types = list(dict.fromkeys(each.candidate.weights.label for each in points))
    for number, (each, (at, loss)) in enumerate(zip(points, shown, strict=True), start=1):
        paint = colour(types.index(each.candidate.weights.label))
        chart.mark(at, loss, paint, "circle", f"{number}: {_title(each)}: KL {each.quality.kl:.4f}, {at:.4g} {label}")
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
    return " ".join(part for part in (cell.policy, cell.kv_dtype) if part) + rows


def _token_s(point: Point) -> float | None:
    return 1 / point.ranking_tok_s if point.ranking_tok_s else None


def _then(points: Sequence[Point]) -> str:
    """The time in a long run, in words, at which speed and joules rank on a device that throttles; else ""."""
    runs = [each.candidate.sustained.seconds for each in points if each.candidate.sustained]
    return f" after {max(runs) / 60:.0f} min" if runs else ""


def _number(value: float | None, form: Callable[[float], str]) -> str:
    return NONE if value is None else form(value)
