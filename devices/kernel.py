"""Readers of the kernel's files (procfs, sysfs), which are not trusted: in containers and under EDGE_SENSORS their
paths may hold other things. Regular files only, of bounded length, in any encoding."""

from __future__ import annotations

import re
from pathlib import Path

from edge.devices.regular import open_regular

_MOST_BYTES = 16 << 20  # smaps has the longest texts: some hundred bytes a mapping
_BLOCK = 1 << 16
_WHOLE = re.compile(r"\s*([+-]?\d{1,19})\s*", re.ASCII)


def read_text(path: Path) -> str:
    """A file's stripped text; empty where there is nothing to read."""
    try:
        return load_text(path)
    except (OSError, ValueError):  # ValueError: a path with a zero byte
        return ""


def load_text(path: Path) -> str:
    """As `read_text`, but raises OSError where there is nothing to read, and ValueError for an invalid path."""
    found = bytearray()
    with open_regular(path) as file:
        while len(found) < _MOST_BYTES and (block := file.read1(_BLOCK)):
            found += block
    return found.decode("utf-8", "replace").strip()


def read_whole(path: Path) -> int | None:
    """The integer in a file; None if it holds none."""
    return whole(read_text(path))


def whole(text: str) -> int | None:
    """Parse an integer; None for other texts and for more than 19 digits."""
    match = _WHOLE.fullmatch(text)
    return int(match[1]) if match else None
