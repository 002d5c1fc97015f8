"""Stamps: a small file `NAME.ok` beside a file says what that file was when we completed it.

Size and times tell cheaply that nobody wrote to it since; the checksum tells it when the times changed, as they do
when a folder is copied or restored. The stamp's own time is that of the last use.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from edge.devices.private import is_private_file

_MOST_BYTES = 8192  # no stamp of ours is longer
_ABOUT_CHARACTERS = 200


@dataclass(frozen=True)
class Stamp:
    """A file as it was completed: bytes, nanoseconds, checksum of the content, and what a person reads about it."""

    size: int
    mtime_ns: int
    ctime_ns: int
    crc32: int
    about: str


def stamp_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.ok")


def status_of(path: Path) -> os.stat_result | None:
    """What lies there, links not followed; None if nothing that we can see."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def make_temporary(path: Path) -> Path:
    """An empty file `.PID-RANDOM-NAME` beside `path`, nobody else's. Raises OSError.

    The name ends like that of `path`, as compilers look at endings.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{os.getpid()}-", suffix=f"-{path.name}")
    os.close(descriptor)
    return Path(name)


def complete(temporary: Path, path: Path, about: str) -> None:
    """Make a written file the file `path`, with a stamp. Raises OSError.

    The stamp comes first, so that the file never lies there without one, even when two processes do this at once;
    it comes again with the final times, as renaming changes them.
    """
    with open(temporary, "r+b") as file:
        os.fsync(file.fileno())  # after a power cut there must be no stamp whose file was not written out
    stamp = Stamp(temporary.stat().st_size, 0, 0, _checksum(temporary), about[:_ABOUT_CHARACTERS])
    _write(path, stamp)
    os.replace(temporary, path)
    _write(path, _with_times(stamp, os.lstat(path)))


def read_stamp(path: Path) -> Stamp | None:
    """The stamp of the regular file `path`; None if there is none that is well-formed and states the file's size.

    A file or stamp that another user can have written counts as none.
    """
    status, stamp_status = status_of(path), status_of(stamp_path(path))
    if status is None or stamp_status is None or stamp_status.st_size > _MOST_BYTES:
        return None
    if not (is_private_file(status) and is_private_file(stamp_status)):
        return None
    try:
        stamp = Stamp(**json.loads(stamp_path(path).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):  # unreadable, no JSON, other names, nested too deep
        return None
    numbers = (stamp.size, stamp.mtime_ns, stamp.ctime_ns, stamp.crc32)
    if any(type(number) is not int for number in numbers) or not isinstance(stamp.about, str):
        return None
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in stamp.about)
    return replace(stamp, about=printable) if stamp.size == status.st_size else None


def is_whole(path: Path) -> bool:
    """Is the file what its stamp says? Costs a few stats, or one reading of the file if its times have changed."""
    stamp = read_stamp(path)
    if stamp is None:
        return False
    try:
        status = os.lstat(path)
        if stamp == _with_times(stamp, status):
            return True
        if _checksum(path) != stamp.crc32:
            return False
    except OSError:  # what the disk cannot read is not whole
        return False
    with contextlib.suppress(OSError):  # a folder that we may only read serves as well
        _write(path, _with_times(stamp, status))
    return True


def _with_times(stamp: Stamp, status: os.stat_result) -> Stamp:
    return replace(stamp, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns)


def _write(path: Path, stamp: Stamp) -> None:
    """Put the stamp of `path` in place in one step. Raises OSError."""
    temporary = make_temporary(stamp_path(path))
    try:
        temporary.write_text(json.dumps(asdict(stamp)), encoding="ascii")
        os.replace(temporary, stamp_path(path))
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _checksum(path: Path) -> int:
    checksum = 0
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            checksum = zlib.crc32(block, checksum)
    return checksum
