"""Opens regular files only: a FIFO would block its reader, and a device may have no end."""

from __future__ import annotations

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """The file, to read bytes from. Raises OSError, also for other than regular files."""
    return open(path, "rb", opener=_regular)


def read_regular(path: Path, most: int = -1) -> bytes:
    """The content of the file, at most `most` bytes. Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # read() takes as much memory as it is told to read
        return file.read(size if most < 0 else min(most, size + 1))


def _regular(path: str, flags: int) -> int:
    """O_NONBLOCK: opening a FIFO waits for its writer otherwise. Regular files know no difference."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor
