"""What commands print: progress on stderr, reports and tables for people, JSON for programs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any

from edge.budget import format_bytes, format_joules
from edge.model.text import well_formed
from edge.report import table as tables

if TYPE_CHECKING:
    from edge.run.report import Action, Heat, RunReport, Timings


def print_json(value: Any, indent: int | None = None) -> None:
    """One object to stdout, on one line unless indented."""
    print(to_json(value, indent), flush=True)


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON in characters that stdout can show: in UTF-8 as they are, else escaped."""
    plain = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
    return well_formed(json.dumps(value, ensure_ascii=plain, allow_nan=False, indent=indent))


def note(text: str) -> None:
    """A line for the person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def printable(text: str, but: str = "\n\t") -> str:
    """Foreign text for a terminal: control characters, but for these, could do anything there."""
    return "".join(each if each.isprintable() or each in but else "\N{REPLACEMENT CHARACTER}" for each in text)


def width() -> int | None:
    """Characters of a line of the terminal that stdout is, COLUMNS if that is set; None if it is no terminal: what
    programs read stays one line a row."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table as wide as the terminal at most; see edge.report.table."""
    return tables.table(headings, rows, left, width())


class Progress:
    """A transient bar on stderr for one long step at a time; silent unless a person is watching."""

    def __init__(self, enabled: bool) -> None:
        self._bar: Any = None
        self._drawn = False
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._task: Any = None

    def step(self, label: str) -> Callable[[float, float], None]:
        """A callback (done, total) that draws the step `label`; the bar goes away when it is done."""

        def update(done: float, total: float) -> None:
            if self._bar is None:
                return
            if self._task is None:
                self._drawn = True
                self._bar.start()
                self._task = self._bar.add_task(label, total=total)
            self._bar.update(self._task, completed=done, total=total, description=label)
            if done >= total:
                self.clear()

        return update

    def message(self, label: str) -> None:
        """A line without an end in sight."""
        if self._bar is not None:
            if self._task is None:
                self._drawn = True
                self._bar.start()
                self._task = self._bar.add_task(label, total=None)
            self._bar.update(self._task, description=label)

    def clear(self) -> None:
        """Take the bar off the screen, so that text can be printed."""
        if self._bar is not None and self._drawn:
            self._bar.stop()  # first: an interrupt may have come before there was a task
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._drawn, self._task = False, None


@contextmanager
def progress(enabled: bool) -> Iterator[Progress]:
    shown = Progress(enabled)
    try:
        yield shown
    finally:
        shown.clear()


def report_line(report: RunReport) -> list[str]:
    """The report in a line; `--verbose` has the rest."""
    tokens, timings, memory, energy = report.tokens, report.timings, report.memory, report.energy
    how = "estimated" if energy.kind == "estimate" else "measured"
    said = [
        f"{tokens.generated} tokens{_at(timings.decode_tok_s)}",
        f"first after {_seconds(timings.ttft_s)}" if timings.ttft_s is not None else "",
        f"peak {format_bytes(memory.peak_rss)}" + (f" of {format_bytes(memory.budget)}" if memory.budget else ""),
        f"{format_joules(energy.joules)}{f' of {format_joules(energy.budget)}' if energy.budget else ''} ({how})",
        f"{tokens.reused + tokens.ran} of {tokens.prompt_words} prompt tokens run" if tokens.cut else "",
        "memory was given back" if report.actions else "",
        f"stopped: {report.stop_reason}",
        "-v: more",
    ]
    return [" · ".join(filter(None, said))]


def report_lines(report: RunReport) -> list[str]:
    """The report for a person: four lines, and one for memory that was given back."""
    tokens, timings, memory, kv = report.tokens, report.timings, report.memory, report.kv
    budget = f" of {format_bytes(memory.budget)}" if memory.budget else ""
    said = [f"{tokens.reused} of them reused"] if tokens.reused else []
    said += [f"only {tokens.ran} run"] if tokens.cut else []
    speed = _at(timings.prefill_tok_s)
    prompt = f"prompt {', '.join([f'{tokens.prompt_words} tokens', *said])}{',' if said and speed else ''}{speed}"
    return [
        f"{prompt} · generated {tokens.generated}"
        f"{_at(timings.decode_tok_s)} · first token {_seconds(timings.ttft_s)} · load {_seconds(timings.load_s)}"
        f"{_time(timings)} · stopped: {report.stop_reason}",
        f"memory peak {format_bytes(memory.peak_rss)}{budget} (measured)"
        f" · interpreter {format_bytes(memory.interpreter)} + weights {format_bytes(memory.weights)}"
        f" + KV {format_bytes(memory.kv)} + scratch {format_bytes(memory.scratch)} (counted)"
        + (f" · {format_bytes(memory.streamed)} of weights streamed per token" if memory.streamed else ""),
        f"KV {kv.policy} {kv.dtype}: {kv.rows} of {kv.capacity} rows, {kv.evicted} evicted",
        _energy_line(report),
        *([f"for want of memory: {', '.join(map(_action, report.actions))}"] if report.actions else []),
    ]


_REASONS = {
    "limit": "the limit of memory fell",
    "free memory": "the system ran short of free memory",
    "pressure": "the system was waiting for memory",
    "trim": "session.trim asked for it",
}


def _action(action: Action) -> str:
    size = format_bytes(action.bytes)
    what = {
        "shrink": f"{size} of KV rows given back ({action.left} rows are left)",
        "chunk": f"the rest of the prompt run {action.left} tokens at a time",
        "prompt cache": f"{size} of prompt cache given back",
    }
    when = f"after {action.token} tokens of the answer" if action.token else "before the answer"
    return f"{what[action.action]} {when}, as {_REASONS.get(action.reason, action.reason)}"


def _energy_line(report: RunReport) -> str:
    energy, heat = report.energy, report.heat
    how = "estimated" if energy.kind == "estimate" else "measured"
    return (
        f"energy {format_joules(energy.joules)}"
        + (f" + {format_joules(energy.before)} for the start," if energy.before and energy.budget is not None else "")
        + (f" of {format_joules(energy.budget)}" if energy.budget is not None else "")
        + (f", {format_joules(energy.per_token)} per token" if energy.per_token is not None else "")
        + f" ({how}: {energy.source}, the whole {energy.scope})"
        + (f" · {energy.watts:.2g} W of {energy.watts_limit:g} W" if energy.watts_limit is not None else "")
        + (f" · paused {report.timings.paused_s:.1f} s" if report.timings.paused_s >= 0.05 else "")
        + (f" · {_heat(heat)}" if heat and heat.highest is not None else "")
        + (" · the start alone takes more than the budget" if energy.before > (energy.budget or inf) else "")
    )


def _time(timings: Timings) -> str:
    if timings.budget_s is None:
        return ""
    before = f" + {timings.before_s:.2f} s for the start," if timings.before_s else ""
    return f" · took {timings.total_s:.2f} s{before} of {timings.budget_s:g} s"


def _heat(heat: Heat) -> str:
    limit = "" if heat.limit is None else f" of {heat.limit:g} °C"
    return f"{heat.highest:.0f} °C{limit} at {heat.sensor} (measured)"


def _at(speed: float | None) -> str:
    return "" if speed is None else f" at {speed:.0f} tok/s"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f} s"
