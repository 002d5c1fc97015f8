"""Where prompts come from, and how long answers may be."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from edge.errors import InputError

_BLOCK = 64 << 10  # characters read at a time: a prompt of any length is tokenized as it is read


def answer_limit(max_tokens: int) -> int | None:
    """-n as the session wants it: None is no limit. Raises InputError."""
    if max_tokens == 0 or max_tokens < -1:
        raise InputError(f"--max-tokens must be at least 1, or -1 for no limit, not {max_tokens}")
    return None if max_tokens == -1 else max_tokens


def read_prompt(prompt: str | None, file: Path | None) -> str | Iterator[str]:
    """The prompt from -p, from a file, or from stdin; the latter two in blocks. Raises InputError."""
    if prompt is not None and file is not None:
        raise InputError("give the prompt with -p or with --file, not both")
    if prompt is not None and prompt != "-":
        return prompt
    if file is not None:
        return read_text(file)
    if sys.stdin is None or sys.stdin.isatty():
        raise InputError("no prompt: give one with -p, with --file, or on stdin")
    return _blocks(sys.stdin.buffer, "the prompt on stdin")


def read_text(path: Path) -> Iterator[str]:
    """A UTF-8 text file in blocks; bytes that are not UTF-8 become U+FFFD. Raises InputError."""
    if not path.is_file():
        raise InputError(f"{path}: {'not a file' if path.exists() else 'no such file'}")
    try:
        return _blocks(open(path, "rb"), str(path))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def read_lines() -> Iterator[str]:
    """Lines of stdin as they come, without their ends; none if it is closed. Raises InputError."""
    if sys.stdin is None:
        return
    try:
        for line in sys.stdin:
            yield line.rstrip("\n")
    except OSError as error:
        raise InputError(f"stdin cannot be read ({error.strerror})") from None


def _blocks(binary: BinaryIO, what: str) -> Iterator[str]:
    empty = True
    try:
        with io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="") as text:
            while block := text.read(_BLOCK):
                empty = False
                yield block
    except OSError as error:
        raise InputError(f"{what} cannot be read ({error.strerror})") from None
    if empty:
        raise InputError(f"{what} is empty")
