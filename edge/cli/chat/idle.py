"""`edge chat --summarize`: work between an answer and the next question."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from edge.budget import format_joules
from edge.cli.chat.lines import Line
from edge.cli.terminal.show import note
from edge.errors import EdgeError

if TYPE_CHECKING:
    from edge.run.conversation import Conversation, Summary  # command.py imports it only when it runs


class Idle:
    """Summarizes old turns between two questions. talk: returns the conversation."""

    def __init__(self, talk: Callable[[], Conversation], *, quiet: bool) -> None:
        self._talk, self._quiet = talk, quiet

    def between(self, lines: Iterator[Line], *, typed: bool) -> Iterator[Line]:
        """The lines. At a terminal, the work ends as soon as a line is typed; else, each line waits for it."""
        while True:
            made: list[Summary | None] = []
            worker = threading.Thread(target=self._summarize, args=(made,), daemon=True)
            worker.start()
            if not typed:
                worker.join()
            try:
                line = next(lines, None)
            finally:  # also if a signal ends the chat
                while worker.is_alive():
                    self._talk().session.interrupt()  # again, since it might not have begun yet
                    worker.join(0.01)
            if made and made[0] is not None and not self._quiet:
                note(said(made[0]))
            if line is None:
                return
            yield line

    def _summarize(self, made: list[Summary | None]) -> None:
        try:
            made.append(self._talk().summarize())
        except EdgeError as error:
            note(f"edge: the summary failed: {error}")


def said(summary: Summary) -> str:
    """A line about a summary."""
    turns = "1 turn is" if summary.turns == 1 else f"{summary.turns} turns are"
    counts = f"{summary.before:,} tokens, now {summary.after:,}; {format_joules(summary.joules)}"
    return f"({turns} summarized: {counts})"
