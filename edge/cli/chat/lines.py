"""The turns of a chat: typed at a terminal, or the lines of a file.

A terminal is in one of two modes. While a line is edited, readline controls it, echoes input, and inserts a paste of
several lines into the line. At all other times input is not echoed, so that it does not appear within the answer: it
waits, with pastes in brackets, until readline reads it at the next prompt.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from edge.cli.terminal.prompts import read_lines
from edge.cli.terminal.show import note
from edge.cli.terminal.signals import Terminated, get_over_it
from edge.records import dataclass

PROMPT, MORE = "› ", "… "
_BLOCK = '"""'
_BRACKETS_ON, _BRACKETS_OFF = "\x1b[?2004h", "\x1b[?2004l"  # the terminal then marks the beginning and end of a paste
_HIDDEN_FLAGS = ("ECHO", "ICANON", "IEXTEN")  # cleared, so that the terminal neither echoes nor interprets input


@dataclass(frozen=True)
class Line:
    """One turn. verbatim: from a block, in which a slash at the beginning has no meaning."""

    text: str
    verbatim: bool = False


def is_terminal() -> bool:
    """Whether a person types and sees the answer; prompts do not belong into a file."""
    return bool(sys.stdin and sys.stdin.isatty() and sys.stdout and sys.stdout.isatty())


def lines_of(lines: Iterator[str]) -> Iterator[Line]:
    """The turns in a text: lines and blocks."""
    for line in lines:
        yield _joined(line, lambda: next(lines))


class Terminal:
    """A context manager that hides input, except while `lines` edits a line."""

    def __init__(self) -> None:
        import readline

        self._readline = readline
        self._brackets = "libedit" not in (readline.__doc__ or "")  # only GNU readline recognizes pastes
        if self._brackets:
            readline.parse_and_bind("set enable-bracketed-paste on")
        self._modes: list[Any] = []

    def __enter__(self) -> Terminal:
        self._hide()
        return self

    def __exit__(self, *_: object) -> None:
        self._show()
        self._write(_BRACKETS_OFF)

    def lines(self) -> Iterator[Line]:
        """Turns typed at the prompt, until Ctrl-D. Raises KeyboardInterrupt at the second Ctrl-C in a row."""
        asked = False
        while True:
            try:
                line = _joined(self._read(PROMPT), lambda: self._read(MORE))
            except EOFError:
                note("")  # the shell's prompt gets a line of its own
                return
            except Terminated:
                raise
            except KeyboardInterrupt:
                note("")
                typed = self._readline.get_line_buffer()
                if asked and not typed:
                    raise
                asked = not typed
                if asked:
                    note("press Ctrl-C again or Ctrl-D to leave")
                get_over_it()
                continue
            asked = False
            yield line

    def _read(self, prompt: str) -> str:
        self._show()
        try:
            text = input(prompt)
            while not self._brackets and self._more_is_there():
                text += "\n" + input()  # the rest of a paste
        finally:
            self._hide()
        return text.strip("\n")

    def _more_is_there(self) -> bool:
        return bool(select.select([sys.stdin.fileno()], [], [], 0)[0])

    def _hide(self) -> None:
        import termios

        self._modes = termios.tcgetattr(sys.stdin.fileno())
        modes = termios.tcgetattr(sys.stdin.fileno())
        modes[3] &= ~sum(getattr(termios, name) for name in _HIDDEN_FLAGS)
        modes[3] |= termios.NOFLSH  # Ctrl-C ends an answer and does not flush input
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, modes)
        self._write(_BRACKETS_ON)

    def _show(self) -> None:
        import termios

        termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._modes)

    def _write(self, control: str) -> None:
        if self._brackets and os.environ.get("TERM", "dumb") != "dumb":
            sys.stdout.write(control)
            sys.stdout.flush()


def _joined(text: str, more: Callable[[], str]) -> Line:
    """A line, or a block whose further lines come from `more`; the end of input also ends it."""
    if not text.lstrip().startswith(_BLOCK):
        return Line(text)
    block = text.lstrip()[len(_BLOCK) :]
    while not block.rstrip().endswith(_BLOCK):
        try:
            block += "\n" + more()
        except (EOFError, StopIteration):
            return Line(block.strip("\n"), verbatim=True)
    return Line(block.rstrip()[: -len(_BLOCK)].strip("\n"), verbatim=True)


@contextmanager
def turns(typed: bool) -> Iterator[Iterator[Line]]:
    """The turns of a chat: typed at a terminal, or the lines of stdin."""
    if not typed:
        yield lines_of(read_lines())
        return
    if sys.platform == "win32":  # neither readline nor termios: the console edits lines
        yield _typed()
        return
    with Terminal() as terminal:
        yield terminal.lines()


def _typed() -> Iterator[Line]:
    """Turns typed at the prompt of a console, until the end of input."""
    while True:
        try:
            yield _joined(input(PROMPT), lambda: input(MORE))
        except EOFError:
            return
