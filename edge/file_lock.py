"""A lock between processes, named by a file. The system lets go of it when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NO_LOCKS_HERE = {errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS}  # some network folders


@contextmanager
def file_lock(path: Path) -> Iterator[None]:
    """Hold the lock `path`, after waiting for it; not reentrant. Does nothing where files have no locks.

    The file is there only while somebody holds or awaits the lock. Raises OSError if it cannot be written.
    """
    descriptor = _acquire(path)
    try:
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                path.unlink()  # while we hold it: those who wait then see that their file is gone
            os.close(descriptor)


def _acquire(path: Path) -> int | None:
    """An open file that holds the lock; None where there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                return descriptor
        except OSError as error:
            if error.errno not in _NO_LOCKS_HERE:
                os.close(descriptor)
                raise
            os.close(descriptor)
            return None
        except BaseException:  # Ctrl-C while waiting
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last holder removed the file: the next ones lock a new one


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False
