"""What a file contains, as a hash. The whole file is read once, and not again while the system says it is unchanged.

Everything derived from a model is keyed by this. The size, both times, the inode and the device tell cheaply that a
file is the one that was read. Times that anyone can set do not: the change time is the kernel's own.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from edge import cache
from edge.errors import CacheError, ModelFormatError

_BLOCK = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A file that is written twice within a tick of the system's clock (up to 10 ms; 2 s on FAT) keeps its times.
_SETTLED_NS = 2_000_000_000


def content_hash(path: Path, progress: Callable[[float], None] | None = None) -> str:
    """SHA-256 of a file in hexadecimal. Remembered in the cache folder, if that can be written.

    progress: called with the part that was read, from 0 to 1, if the file is read at all. Raises ModelFormatError if it
    is no regular file, cannot be read, or changes meanwhile.
    """
    try:
        # Opening a pipe would wait for its writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ModelFormatError(f"{path}: not a regular file")
            key, started = _identity(status), time.time_ns()
            if known := _remembered(key):
                return known
            digest, done = hashlib.sha256(), 0
            while done <= status.st_size and (block := file.read(_BLOCK)):  # one that grows might never end
                digest.update(block)
                done += len(block)
                if progress and status.st_size:
                    progress(min(1.0, done / status.st_size))
            unchanged = _identity(os.fstat(file.fileno())) == key and done == status.st_size
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None
    if not unchanged:
        raise ModelFormatError(f"{path}: changed while it was read: try again when it is complete")
    if started - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS:
        _remember(key, digest.hexdigest(), path.name)
    return digest.hexdigest()


def _identity(status: os.stat_result) -> str:
    """The name in the cache of what is remembered of a file."""
    numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:32]


def _remembered(key: str) -> str | None:
    path = cache.find("weights", key, ".sha256")
    if path is None:
        return None
    try:
        found = path.read_text(encoding="ascii")
    except (OSError, ValueError):  # another process removed it
        return None
    return found if _SHA256.fullmatch(found) else None


def _remember(key: str, digest: str, name: str) -> None:
    with suppress(CacheError), cache.create("weights", key, ".sha256", f"{name}, its hash") as temporary:
        temporary.write_text(digest, encoding="ascii")
