"""Completion records: `NAME.ok` beside a file states that it was written completely, with its size, times and checksum.

Unchanged size and times show cheaply that the file is intact. If its times changed, as when a folder is copied or
restored, the checksum decides. The record's own mtime is the time of the file's last use.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from edge.devices.private import is_private_file
from edge.records import dataclass

_MOST_BYTES = 8192  # of a record
_ABOUT_CHARACTERS = 200


@dataclass(frozen=True)
class Completion:
    """A file's state when it was completed."""

    size: int  # bytes
    mtime_ns: int  # nanoseconds since 1970
    ctime_ns: int
    crc32: int
    about: str  # description for people


def record_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.ok")


def status_of(path: Path) -> os.stat_result | None:
    """The status of a file, links not followed; None if there is none or it is not visible."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def make_temporary(path: Path) -> Path:
    """Make an empty file `.PID-RANDOM-NAME` beside `path`, for this user alone. Raises OSError.

    Its suffix is that of `path`, since compilers look at suffixes.
    """
    import tempfile  # here: it takes milliseconds, and warm runs write nothing

    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{os.getpid()}-", suffix=f"-{path.name}")
    os.close(descriptor)
    return Path(name)


@contextlib.contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield an empty file beside `path` that replaces it if the block ends well. Raises OSError.

    For cache files, which are checked when read: unlike `edge.devices.output.new_file`, it does not wait for the disk.
    """
    temporary = make_temporary(path)
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # it is there only if something failed


def complete(temporary: Path, path: Path, about: str) -> None:
    """Move a written file to `path` and record its completion. Raises OSError.

    The record is written first, so that the file is never without one, even when two processes do this at once; and
    again with the final times, because renaming changes them.
    """
    with open(temporary, "r+b") as file:
        os.fsync(file.fileno())  # after a power cut there must be no record of a file that was not written out
    record = Completion(temporary.stat().st_size, 0, 0, _checksum(temporary), about[:_ABOUT_CHARACTERS])
    _write(path, record)
    os.replace(temporary, path)
    _write(path, _with_times(record, os.lstat(path)))


def read_completion(path: Path) -> Completion | None:
    """The record of the regular file `path`; None unless it is well-formed and states the file's size.

    Files and records that another user can have written are ignored.
    """
    status, record_status = status_of(path), status_of(record_path(path))
    if status is None or record_status is None or record_status.st_size > _MOST_BYTES:
        return None
    if not (is_private_file(status) and is_private_file(record_status)):
        return None
    try:
        record = Completion(**json.loads(record_path(path).read_bytes()))
    except (OSError, ValueError, TypeError, RecursionError):  # unreadable, not JSON, other fields, nested too deep
        return None
    numbers = (record.size, record.mtime_ns, record.ctime_ns, record.crc32)
    if any(type(number) is not int for number in numbers) or not isinstance(record.about, str):
        return None
    printable = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in record.about)
    return replace(record, about=printable) if record.size == status.st_size else None


def is_whole(path: Path) -> bool:
    """Whether the file matches its record. Costs a few stats, or one reading of the file if its times have changed."""
    record = read_completion(path)
    if record is None:
        return False
    try:
        status = os.lstat(path)
        if record == _with_times(record, status):
            return True
        if _checksum(path) != record.crc32:
            return False
    except OSError:  # an unreadable file is not whole
        return False
    with contextlib.suppress(OSError):  # a read-only folder suffices
        _write(path, _with_times(record, status))
    return True


def _with_times(record: Completion, status: os.stat_result) -> Completion:
    return replace(record, mtime_ns=status.st_mtime_ns, ctime_ns=status.st_ctime_ns)


def _write(path: Path, record: Completion) -> None:
    """Replace the record of `path` atomically. Raises OSError."""
    with replacement(record_path(path)) as temporary:
        temporary.write_text(json.dumps(asdict(record)), encoding="ascii")


def _checksum(path: Path) -> int:
    checksum, block = 0, memoryview(bytearray(1 << 18))  # one for all: new ones are pages that the system clears
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            checksum = zlib.crc32(block[:count], checksum)
    return checksum
