"""Content hashes of files: the key of everything derived from a model.

The SHA-256 is remembered in the cache folder under the file's identity and state: device, inode, size, mtime, and
ctime, which no program can set back. An unchanged file is thus hashed once, and a file changed in place with its old
mtime restored is hashed again.

    found = fingerprint(path)  # reads the file, once
    …                          # derive something from it, under a key that contains found.sha256
    found.check()              # raises InputError if the file changed meanwhile
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from edge.devices.keys import key_of
from edge.errors import CacheError, InputError
from edge.records import dataclass
from edge.storage import cache
from edge.types import Progress

_BLOCK = 1 << 18  # bytes read at a time
_TICK = 2_000_000_000  # nanoseconds, the coarsest resolution of file times: two changes within it look like one
_SHA256 = re.compile(rb"[0-9a-f]{64}")


@dataclass(frozen=True)
class FileState:
    """The identity and state of a file: differs once it was replaced, written to or moved. Times are nanoseconds since
    1970."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@dataclass(frozen=True)
class Fingerprint:
    """A file's hash, with the state in which it was read."""

    path: Path
    sha256: str  # of the whole file, hexadecimal
    state: FileState

    def check(self) -> None:
        """Raise InputError if the file has changed since: later reads may mix two versions."""
        if _state(self.path) != self.state:
            raise InputError(f"{self.path} changed while edge read it: try again once it is written completely")


def fingerprint(path: Path, progress: Progress | None = None) -> Fingerprint:
    """Hash a file, or return the remembered hash. progress: called with the fraction read.

    Raises InputError if the file cannot be read, or changes meanwhile.
    """
    state, now = _state(path), time.time_ns()
    key = key_of(repr(state))
    if known := _remembered(key):
        return Fingerprint(path, known, state)
    found = Fingerprint(path, hash_file(path, progress), state)
    found.check()
    if abs(now - state.ctime_ns) > _TICK:
        with suppress(CacheError):  # then it is read again next time
            _remember(key, found)
    return found


def hash_file(path: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of a whole file, hexadecimal. Raises InputError if it cannot be read."""
    import hashlib  # loads OpenSSL

    digest, done, block = hashlib.sha256(), 0, memoryview(bytearray(_BLOCK))
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            while count := file.readinto(block):
                digest.update(block[:count])
                done += count
                if progress:
                    progress(min(1.0, done / max(1, size)))
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def _state(path: Path) -> FileState:
    try:
        return FileState.of(path.stat())
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from None


def _remembered(key: str) -> str | None:
    with suppress(OSError):  # another process may have removed it just now
        if found := cache.find("hashes", key, ".sha256"):
            content = found.read_bytes()
            return content.decode() if _SHA256.fullmatch(content) else None
    return None


def _remember(key: str, found: Fingerprint) -> None:
    with cache.create("hashes", key, ".sha256", about=found.path.name) as target:
        target.write_text(found.sha256, encoding="ascii")
