"""Opening regular files only, and reading them whole: a FIFO would block its reader, and a device may have no end."""

from __future__ import annotations

import errno
import os
import re
import stat
from io import BufferedReader
from pathlib import Path

from edge.errors import EdgeError, InputError

NO_TEXT = "is no text: it has NUL bytes (of UTF-16? edge reads UTF-8)"
_HEAD = 4096  # bytes by which a text is told from other files


def check_file(path: Path) -> None:
    """Raise InputError unless the path that a user named is a file."""
    if path.is_file():
        return
    if address := re.match(r"(https?):[/\\]+(.*)", str(path)):
        raise InputError(f"{address[1]}://{address[2]}: addresses are not fetched: save it, and name the file")
    raise InputError(f"{path}: {'not a file' if path.exists() else 'no such file'}")


def check_text(path: Path) -> None:
    """Raise InputError unless the path that a user named is a file that begins as a text."""
    check_file(path)
    try:
        if b"\0" in read_regular(path, _HEAD):
            raise InputError(f"{path} {NO_TEXT}")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading bytes. Raises OSError, also for anything else."""
    return open(path, "rb", opener=_regular)


def read_regular(path: Path, most: int = -1) -> bytes:
    """Read at most `most` bytes of a regular file (-1: all). Raises OSError as `open_regular` does."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size  # read() takes as much memory as it is told to read
        return file.read(size if most < 0 else min(most, size + 1))


def read_bounded(path: Path, most: int, what: str, error: type[EdgeError] = InputError) -> bytes:
    """Read all of a regular file. Raises `error` if that fails, or if the file has more than `most` bytes, which is too
    long for `what`."""
    try:
        data = read_regular(path, most + 1)
    except OSError as found:
        raise error(f"{path}: cannot be read ({found.strerror})") from None
    if len(data) > most:
        raise error(f"{path}: too long for {what}")
    return data


def _regular(path: str, flags: int) -> int:
    """An opener with O_NONBLOCK: opening a FIFO would wait for its writer. Regular files ignore the flag."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor
