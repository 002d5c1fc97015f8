"""stdin, stdout and stderr of commands: a failed write to stdout is an error, one to stderr is not, and characters that
cannot be decoded or encoded are replaced."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, TextIO

from edge.errors import OutputError


class ReaderLeftError(OutputError):
    """The reader of stdout has left (`edge run … | head -1`): no message, and the exit code of a death by SIGPIPE."""

    exit_code = 141


class _Output(io.FileIO):
    """stdout: a failed write raises OutputError."""

    def write(self, data: Any) -> int:
        try:
            while (written := super().write(data)) is None:  # the file is non-blocking, and full
                select.select([], [self], [])
        except BrokenPipeError:
            raise ReaderLeftError("the reader of stdout has left") from None
        except OSError as error:
            raise OutputError(f"stdout cannot be written ({error.strerror})") from None
        return written


class _Log(io.FileIO):
    """stderr: a failed write is ignored."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def open_streams() -> None:
    """Replace Python's streams by those of this module, except streams that a caller has replaced already.

    A closed stream is None in Python. Its file descriptor would go to the next file that is opened, and a write to 1 or
    2 would then damage that file: /dev/null takes the descriptor.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    elif sys.stdin is sys.__stdin__ and isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding=None if sys.stdin.isatty() else "utf-8", errors="replace")
    if sys.stdout is sys.__stdout__:
        number = os.open(os.devnull, os.O_RDONLY) if sys.stdout is None else 1  # open for reading: writing to it fails
        sys.stdout = _text(_Output(number, "w", closefd=False), sys.stdout, errors="replace")
    if sys.stderr is sys.__stderr__:
        number = os.open(os.devnull, os.O_WRONLY) if sys.stderr is None else 2
        sys.stderr = _text(_Log(number, "w", closefd=False), sys.stderr, errors="backslashreplace")


def _text(raw: io.FileIO, before: TextIO | None, errors: str) -> TextIO:
    encoding = "utf-8" if before is None else before.encoding
    lines = raw.isatty() or before is None or bool(before.line_buffering)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=lines)


def give_up_output() -> None:
    """Discard the rest of stdout's buffer, which Python would fail to flush at exit."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())
