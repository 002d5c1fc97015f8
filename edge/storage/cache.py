"""The cache folder: files derived from models (repacked weights, compiled kernels, hashes …) that can be made again.

It is EDGE_CACHE, or the system's folder for caches, and holds at most EDGE_CACHE_LIMIT (16 GiB); the least recently
used entries are evicted first. An entry's name is the caller's hash of everything that its content depends on.

    path = find_or_make(kind, key, suffix, write, about=label)  # write(temporary) is called if there is no entry

`find` returns only entries with a valid completion record (completion.py). Another process may remove an entry at any
time, so open it soon.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, get_args

from edge.budget import format_bytes, parse_bytes
from edge.devices.output import held, sweep
from edge.devices.platform import system_folder
from edge.devices.private import distrust, make_private_folder
from edge.errors import CacheError
from edge.records import dataclass
from edge.storage.completion import complete, is_whole, make_temporary, read_completion, record_path, status_of
from edge.storage.lock import file_lock
from edge.storage.making import making

EntryKind = Literal[
    "models", "weights", "kernels", "hashes", "tokenizers", "templates", "trials", "headers", "races", "traces",
    "searches", "losses",
]  # fmt: skip
ENTRY_KINDS: tuple[EntryKind, ...] = get_args(EntryKind)

_LIMIT = "16GiB"
_DAY = 86_400.0  # seconds
_FULL = {errno.ENOSPC, errno.EDQUOT}
_KEY = re.compile(r"[0-9a-f]{8,128}")
_SUFFIX = re.compile(r"(\.[A-Za-z0-9_-]+)+(?<!\.ok)")
_TIDIED = set[Path]()  # folders, by this process
# The names that may be swept away: temporary files, lock files, entries and completion records.
_OURS = rf"\.(?P<pid>\d+)-\w+-.+|\.{_KEY.pattern}\.lock|{_KEY.pattern}(\.[A-Za-z0-9_-]+)+"


@dataclass(frozen=True)
class Entry:
    """A complete file in the cache."""

    kind: EntryKind
    key: str
    about: str  # description for people
    bytes: int  # size
    last_used: float  # seconds since 1970
    path: Path


def cache_folder() -> Path:
    """The folder, which may not exist."""
    chosen = os.environ.get("EDGE_CACHE") or system_folder("cache")
    return Path(os.path.abspath(os.path.expanduser(chosen)))


def cache_limit() -> int:
    """The limit of all entries in bytes. Raises InputError if EDGE_CACHE_LIMIT is not an amount."""
    return parse_bytes(os.environ.get("EDGE_CACHE_LIMIT") or _LIMIT, "EDGE_CACHE_LIMIT")


def find(kind: EntryKind, key: str, suffix: str) -> Path | None:
    """Return the file of a whole entry and mark it as used. A damaged entry is removed, and None returned.

    A disk error returns None, too. Raises ValueError for names that no entry can have, CacheError if another user can
    write to the folder.
    """
    path = _place(kind, key, suffix)
    if not _is_folder(path.parent) or status_of(path) is None:
        return None  # a record without a file stays: another process may be about to move the file here
    if not is_whole(path):
        _remove(path)
        return None
    with contextlib.suppress(OSError):  # a read-only folder suffices
        os.utime(record_path(path))
    return path


@contextmanager
def create(kind: EntryKind, key: str, suffix: str, about: str = "", expected: int = 0) -> Iterator[Path]:
    """Yield an empty temporary file, whose name ends in `suffix` and which becomes the entry if the block ends well.

    expected: the size in bytes, if known, to notice a full disk beforehand. Write with write(), not through a memory
    map, which would kill the process on a full disk. If the limit is exceeded, other entries are evicted. Raises
    CacheError if the folder cannot be written or is full, InputError for a bad limit.
    """
    limit = cache_limit()
    path = _place(kind, key, suffix)
    with _explained():
        _make_folder(path.parent)
        _refuse_folders(path, record_path(path))
        _check_room(path.parent, expected)
        temporary = make_temporary(path)
    try:
        with held(temporary), _explained(only=_FULL):  # other errors of the block are the caller's own
            yield temporary
        with _explained():
            complete(temporary, path, about)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()  # it is there only if something failed
    _tidy(limit, keep=path)


@contextmanager
def lock(kind: EntryKind, key: str) -> Iterator[None]:
    """Let one process or thread at a time make an entry; the others wait. Not reentrant. Raises CacheError."""
    path = _place(kind, key, ".lock")
    with contextlib.ExitStack() as held:
        with _explained():
            _make_folder(path.parent)
            path = path.with_name(f".{path.name}")
            _refuse_folders(path)
            held.enter_context(file_lock(path))
        yield


def find_or_make(
    kind: EntryKind, key: str, suffix: str, write: Callable[[Path], None], about: str = "", expected: int = 0
) -> Path:
    """The entry's file; `write(temporary)` creates it if missing. A second process waits for the first.

    Raises CacheError, and the errors of `write`.
    """
    if path := find(kind, key, suffix):
        return path
    with making(), lock(kind, key):
        if path := find(kind, key, suffix):
            return path
        with create(kind, key, suffix, about, expected) as temporary:
            write(temporary)
            size = temporary.stat().st_size
        if path := find(kind, key, suffix):
            return path
    raise CacheError(
        f"{_place(kind, key, suffix)}, of {format_bytes(size)}, was removed or changed by another process as soon as "
        f"it was made (EDGE_CACHE_LIMIT is {format_bytes(cache_limit())}): try again"
    )


def entries(kind: EntryKind | None = None) -> list[Entry]:
    """All whole entries (of one kind), most recently used first. Checks sizes, not contents. Raises CacheError."""
    found: list[Entry] = []
    for each in _kinds(kind):
        folder = cache_folder() / each
        with _explained():
            names = os.listdir(folder) if _is_folder(folder) else []
        found += filter(None, (_entry(each, folder / name) for name in names if not name.startswith(".")))
    return sorted(found, key=lambda entry: entry.last_used, reverse=True)


def clear(kind: EntryKind | None = None) -> tuple[int, int]:
    """Remove all entries (of one kind) and leftovers of dead processes. Returns their number and the bytes freed.
    Raises CacheError."""
    import tempfile

    removed = entries(kind)
    for entry in removed:
        discard(entry)
    leftovers = sum(_sweep(each, older_than=0) for each in _kinds(kind)) + sweep(Path(tempfile.gettempdir()))
    return len(removed), sum(entry.bytes for entry in removed) + leftovers


def discard(entry: Entry) -> None:
    """Remove one entry. Raises CacheError."""
    with _explained():
        entry.path.unlink(missing_ok=True)
        record_path(entry.path).unlink(missing_ok=True)


def _kinds(kind: EntryKind | None) -> tuple[EntryKind, ...]:
    return ENTRY_KINDS if kind is None else (kind,)


def _place(kind: EntryKind, key: str, suffix: str) -> Path:
    """The path of an entry. Raises ValueError for names that might leave the folder: a caller's mistake."""
    if kind not in ENTRY_KINDS or not _KEY.fullmatch(key) or not _SUFFIX.fullmatch(suffix):
        raise ValueError(f"not a cache entry: {kind!r}, {key!r}, {suffix!r}")
    return cache_folder() / kind / f"{key}{suffix}"


def _is_folder(path: Path) -> bool:
    """Whether a kind has a folder. Raises CacheError if another user can have put something into it."""
    _refuse_others(path)
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def _refuse_others(folder: Path) -> None:
    """Raise CacheError if another user can have put something into the folder of a kind, or replaced it."""
    for each in (folder.parent, folder):
        status = status_of(each)
        if status is not None and stat.S_ISLNK(status.st_mode):
            with contextlib.suppress(OSError):
                status = each.stat()
        if status is not None and (why := distrust(status)):
            raise CacheError(
                f"the cache folder {each} is not used, because {why} and what lies there runs as you: "
                f"make it yours alone (chown, chmod go-w), or set EDGE_CACHE to another folder"
            )


def _make_folder(folder: Path) -> None:
    """Make the folder of a kind, for this user only. Raises OSError."""
    _refuse_others(folder)
    make_private_folder(folder)
    if not _is_folder(folder):  # nothing of ours leaves the cache folder through a link
        raise OSError(errno.ELOOP, f"{folder.name} is a link")


def _refuse_folders(*files: Path) -> None:
    """Raise CacheError for a folder in the place of a file, before any work: its content is not ours to remove."""
    for path in files:
        status = status_of(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise CacheError(f"{path} is a folder, where a file of the cache belongs: remove it")


def _check_room(folder: Path, expected: int) -> None:
    """Raise CacheError if the disk has less than `expected` free bytes, OSError if it does not report them."""
    import shutil

    free = shutil.disk_usage(folder).free
    if free < expected:
        raise CacheError(
            f"the cache folder {cache_folder()} has {format_bytes(free)} left and {format_bytes(expected)} are needed: "
            f"free {format_bytes(expected - free)} there, or set EDGE_CACHE to a folder with more room"
        )


def _entry(kind: EntryKind, path: Path) -> Entry | None:
    """The entry whose file is `path`; None if it is not an entry, or not whole by its size."""
    record, record_status = read_completion(path), status_of(record_path(path))
    if record is None or record_status is None:
        return None
    return Entry(kind, path.name.partition(".")[0], record.about, record.size, record_status.st_mtime, path)


def _remove(path: Path) -> None:
    """Remove an entry if possible."""
    for each in (path, record_path(path)):
        with contextlib.suppress(OSError):
            each.unlink()


def _tidy(limit: int, keep: Path) -> None:
    """Evict entries down to `limit` bytes, least recently used first and never `keep`; sweep old leftovers."""
    folder = cache_folder()
    if folder in _TIDIED and _looks_tidy(folder, limit):
        return
    _TIDIED.add(folder)
    found = entries()
    total = sum(entry.bytes for entry in found)
    for entry in reversed(found):
        if total > limit and entry.path != keep:
            _remove(entry.path)
            total -= entry.bytes
    for kind in ENTRY_KINDS:
        _sweep(kind, older_than=_DAY)


def _looks_tidy(folder: Path, limit: int) -> bool:
    """Whether a quick look finds at most `limit` bytes and only pairs of a file and its record, but for what is younger
    than a day, which may still become one. Reading all records would take a quarter of a second for a thousand."""
    total, old = 0, time.time() - _DAY
    for kind in ENTRY_KINDS:
        with contextlib.suppress(OSError), os.scandir(folder / kind) as listed:
            files = (each for each in listed if not each.name.endswith(".lock"))
            found = {each.name: each.stat(follow_symlinks=False) for each in files}
            alone = (name for name in found if (name[:-3] if name.endswith(".ok") else f"{name}.ok") not in found)
            if any(found[name].st_mtime <= old for name in alone):
                return False
            total += sum(each.st_size for each in found.values())
    return total <= limit


def _sweep(kind: EntryKind, older_than: float) -> int:
    """Remove files of ours that belong to no whole entry and no living process; returns the bytes freed.

    Temporary files go once their process is dead. Others must be unmodified for `older_than` seconds, since their
    counterpart may be about to be written.
    """
    folder = cache_folder() / kind
    kept = {path for entry in entries(kind) for path in (entry.path, record_path(entry.path))}
    freed = 0
    for path in folder.iterdir() if _is_folder(folder) else ():
        status, ours = status_of(path), re.fullmatch(_OURS, path.name)
        if path in kept or status is None or ours is None:
            continue
        is_old = time.time() - status.st_mtime >= older_than
        with contextlib.suppress(OSError):
            if _is_left(path, ours["pid"], is_old) if ours["pid"] else is_old:
                path.unlink()
                freed += status.st_size
    return freed


def _is_left(path: Path, pid: str, is_old: bool) -> bool:
    """Whether the process that made a temporary file is dead. A writer locks the file, which is visible even from
    another container, where its process id means nothing; without locks the file's age decides. Raises OSError."""
    import psutil

    with held(path) as free:
        return bool(is_old if free is None else free) and not psutil.pid_exists(int(pid))


@contextmanager
def _explained(only: set[int] | None = None) -> Iterator[None]:
    """Convert OSErrors (with `only` these numbers) into CacheErrors that say what to do."""
    try:
        yield
    except OSError as error:
        if only is not None and error.errno not in only:
            raise
        if error.errno in _FULL:
            todo = "free space there (edge cache clear), or set EDGE_CACHE to a folder with more room"
        else:
            todo = "set EDGE_CACHE to a folder that you can write"
        raise CacheError(f"the cache folder {cache_folder()} cannot be written ({error.strerror}): {todo}") from None
