"""Output of commands: progress on stderr, tables for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any

from edge.cli.terminal.wrap import WordWrap
from edge.model.parts.text import well_formed

SILENT_S = 15.0  # between lines of a log


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
    """Characters of a line of the terminal that stdout is, COLUMNS if that is set; None if it is no terminal:
    programs get a row on one line."""
    return columns() if sys.stdout.isatty() else None


def columns() -> int:
    """Characters of a line of the terminal, COLUMNS if that is set."""
    import shutil

    return shutil.get_terminal_size().columns


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A table as wide as the terminal at most; see edge.lab.report.document."""
    from edge.lab.report.document import table as aligned

    return aligned(headings, rows, left, width())


class ProgressLine:
    """A transient bar on stderr for one long step at a time. Where stderr is no terminal, such as a log, long steps
    leave a line every SILENT_S, and one at their end."""

    def __init__(self, enabled: bool) -> None:
        self._bar: Any = None
        self._drawn = False
        self._lines, self._said_at, self._unended = enabled, monotonic(), ""  # the step of the last line
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
                self._say(label, done, total)
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
        """Show a line for a step of unknown length."""
        if self._bar is not None:
            if self._task is None:
                self._drawn = True
                self._bar.start()
                self._task = self._bar.add_task(label, total=None)
            self._bar.update(self._task, description=label)

    def _say(self, label: str, done: float, total: float) -> None:
        ends = done >= total > 0
        if self._lines and (monotonic() - self._said_at >= SILENT_S or (ends and label == self._unended)):
            self._said_at, self._unended = monotonic(), "" if ends else label
            note(f"{label}: {done / total:.0%}" if total else label)

    def clear(self) -> None:
        """Remove the bar from the screen, so that text can be printed."""
        if self._bar is not None and self._drawn:
            self._bar.stop()  # first: an interrupt may have arrived before there was a task
            for task in self._bar.task_ids:
                self._bar.remove_task(task)
            self._drawn, self._task = False, None


class ThoughtView:
    """Shows a model's thoughts on stderr, dimmed, if a person is watching; the answer then begins on a line below."""

    def __init__(self, enabled: bool, progress: ProgressLine) -> None:
        self._enabled, self._progress = enabled and sys.stderr.isatty(), progress
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        self._dim, self._normal = ("", "") if plain else ("\x1b[2m", "\x1b[22m")
        self._shown = ""
        self._words = WordWrap(columns, self._write)

    def show(self, text: str) -> None:
        """A piece of thoughts."""
        if self._enabled:
            self._progress.clear()
            self._words.write(printable(text))
            self._shown = (self._shown + text)[-2:]

    def end(self) -> None:
        """Before the answer, and at the end of a run."""
        if self._shown:
            self._words.end()
            print("\n" * (2 - self._shown.count("\n")), end="", file=sys.stderr, flush=True)
            self._shown = ""

    def _write(self, text: str) -> None:
        print(self._dim + text + self._normal, end="", file=sys.stderr, flush=True)


@contextmanager
def progress(enabled: bool) -> Iterator[ProgressLine]:
    shown = ProgressLine(enabled)
    try:
        yield shown
    finally:
        shown.clear()
