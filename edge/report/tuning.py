"""Charts of a tuning's trials, for the terminal and as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge.devices.output import write_whole
from edge.errors import InputError
from edge.report.chart import COLOURS, DASHED, INK, Axis, Chart

if TYPE_CHECKING:
    from edge.tuning.search import Trial

_COLOURS = {"better": COLOURS[2], "no better": COLOURS[0], "died": COLOURS[3]}
_REACH = 0.25  # bars of worse trials are cut here


def chart(trials: Sequence[Trial], width: int = 32) -> Any:
    """A rich table with a bar per trial: left of the middle is faster than the defaults."""
    from rich.bar import Bar
    from rich.table import Table

    scores = [trial.score for trial in trials if trial.score is not None]
    reach = min(_REACH, max([abs(score - 1) for score in scores] + [0.01]))
    shown = Table(box=None, pad_edge=False)
    for heading in ("trial", f"time −{reach:.0%} · defaults · +{reach:.0%}", "ratio", "pairs", "fate", "changes"):
        shown.add_column(heading, justify="right" if heading in ("trial", "ratio", "pairs") else "left")
    for number, trial in enumerate(trials, start=1):
        at = 0.0 if trial.score is None else max(-reach, min(reach, trial.score - 1))
        bar = Bar(2 * reach, reach + min(at, 0), reach + max(at, 0) + reach / width, width=width)
        score = "–" if trial.score is None else f"{trial.score:.3f}"
        changes = ", ".join(f"{name} {value}" for name, value in trial.changes.items())
        shown.add_row(str(number), bar, score, str(trial.pairs), trial.fate, changes)
    return shown


def plot(trials: Sequence[Trial], title: str, out: Path) -> None:
    """Write a picture of all trials as SVG. Raises InputError for files of other kinds or that cannot be written."""
    if out.suffix != ".svg":
        raise InputError(f"{out}: the picture is SVG, which browsers show: let its name end in .svg")
    drawn = [(number, trial, trial.score) for number, trial in enumerate(trials, start=1) if trial.score is not None]
    scores = [1.0, *(score for _, _, score in drawn)]
    x, y = Axis(0, len(trials) + 1, "trial"), Axis(0.97 * min(scores), 1.03 * max(scores))
    chart = Chart("Time of prompt and answer with every trial's settings", f"{title}: time / defaults", x, y, 320)
    chart.across(1, INK, DASHED)
    best, line = 1.0, []
    for number, trial, score in drawn:
        line.append((float(number), best))
        best = score if trial.fate == "better" else best
        line.append((float(number), best))
    chart.line(line, INK)
    for fate, paint in _COLOURS.items():
        points = [(number, score) for number, trial, score in drawn if trial.fate == fate]
        for number, score in points:
            chart.mark(number, score, paint, said=f"trial {number}: {score:.3f}, {fate}")
        if points:
            chart.key(f"{fate} ({len(points)})", paint)
    chart.key("best so far", INK, "line")
    chart.key("defaults", INK, "line", DASHED)
    write_whole(out, chart.drawing())
