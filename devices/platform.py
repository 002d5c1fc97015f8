"""Differences of Windows and macOS. Other modules ask here, rather than for a module that may be missing."""

from __future__ import annotations

import mmap
import select
import sys
from typing import TextIO


def map_file(descriptor: int) -> mmap.mmap:
    """A whole file, to be read only, and resident at once where the system can (Linux)."""
    if sys.platform == "win32":
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(descriptor, 0, flags, mmap.PROT_READ)


def has_input(file: TextIO, seconds: float) -> bool:
    """Whether a pipe has data, or ends, within `seconds`. Always True on Windows, which can wait for sockets only."""
    return sys.platform == "win32" or bool(select.select([file], [], [], seconds)[0])


def peak_of_children() -> int:
    """The largest resident set, in bytes, of a child that has ended; 0 where the system does not tell."""
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * maxrss_unit()


def maxrss_unit() -> int:
    """Bytes in which getrusage counts resident sets."""
    return 1 if sys.platform == "darwin" else 1024
