"""A lock between processes, named by a file. The system releases it when its holder dies.

The package `filelock` does the same, but has 1.2 MB and takes 50 ms to import. Ours stays because its timeout names the
process that holds the lock, and because it notices a stopped holder within seconds.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edge.errors import CacheError

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # some network folders
_LONGEST_S = 1800.0  # a large model is compiled in minutes, on a small device
_STOPPED_S = 5.0  # patience with a stopped holder (Ctrl-Z, a debugger), which may go on
_POLL_S = 0.05


@contextmanager
def file_lock(
    path: Path, *, longest: float | None = None, waiting: Callable[[str], None] = lambda holder: None
) -> Iterator[None]:
    """Acquire the lock `path`, waiting if necessary; not reentrant. Does nothing where files have no locks.

    longest: seconds to wait (default: half an hour). waiting: called once with the id of the process that holds the
    lock, or an empty string. The file exists only while a process holds or awaits the lock, and contains the holder's
    id. Raises OSError if it cannot be written, CacheError if its holder is stopped or keeps it for longer.
    """
    descriptor = _acquire(path, _LONGEST_S if longest is None else longest, waiting)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # while we hold it: waiting processes then see that their file is gone
            os.close(descriptor)


def _acquire(path: Path, longest: float, waiting: Callable[[str], None]) -> int | None:
    """Return the descriptor of an open, locked file; None where files have no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    started, told = time.monotonic(), False
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                os.truncate(descriptor, 0)
                os.write(descriptor, str(os.getpid()).encode())
                return descriptor
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace")
            os.close(descriptor)
            if not told:
                told = True
                waiting(holder)
            _check_patience(path, holder, time.monotonic() - started, longest)
            time.sleep(_POLL_S)
            continue
        except OSError as error:
            os.close(descriptor)
            if error.errno not in _NO_LOCKS_HERE:
                raise
            return None
        os.close(descriptor)  # its last holder removed the file: lock a new one


def _check_patience(path: Path, holder: str, waited: float, longest: float) -> None:
    """Raise CacheError if the holder is stopped or the time is up."""
    stopped = waited > _STOPPED_S and _is_stopped(holder)
    if stopped or waited > longest:
        how = "is stopped" if stopped else f"has kept it for {waited / 60:.0f} minutes"
        raise CacheError(f"{path}: process {holder or '?'} holds this lock and {how}: let it go on, or end it")


def _is_stopped(holder: str) -> bool:
    import psutil

    try:
        return psutil.Process(int(holder)).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except (ValueError, psutil.Error):
        return False


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
