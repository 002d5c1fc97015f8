"""Output files appear complete or not at all, with the user's umask, and replace nothing unasked.

They are written to `.edge-tmp-RANDOM-NAME` beside their target and renamed at the end. This process holds a lock on the
temporary file meanwhile, which the system releases when the process dies. A temporary file without a lock was left by a
killed process, and the next process that writes to the same folder removes it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from reprlib import repr as brief

from edge.errors import InputError
from edge.records import dataclass

_TEMPORARY, _OLD = ".edge-tmp-", ".edge-old-"
_OURS = rf"({re.escape(_TEMPORARY)}|{re.escape(_OLD)})[0-9a-f]{{8}}-(?P<name>.+)"
_NAME_BYTES = 120  # of the target's name, at its end: compilers look at endings, and file systems limit names
_RENAME_EXCHANGE, _AT_FDCWD = 2, -100  # of Linux's renameat2
_NO_EXCHANGE = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM}  # kernels and file systems without it


def check_path(name: str, value: object, what: str = "the path of a folder") -> None:
    """Raise InputError for a `value` that is no path."""
    if not isinstance(value, str | os.PathLike):
        raise InputError(f"{name} must be {what}, not {brief(value)}")


def check_parent(path: Path) -> None:
    """Raise InputError unless the parent folder of the output `path` exists: the same rule in every command."""
    parent = path.absolute().parent
    if not parent.is_dir():
        why = "is no folder" if parent.exists() else "is not there: make that folder first"
        raise InputError(f"{path} cannot be written: {parent} {why}")
    with suppress(FileNotFoundError), _explained(path, but=FileNotFoundError):
        os.lstat(path)  # a name that is too long, say


def check_file(path: Path, *, force: bool, magic: bytes = b"", kind: str = "") -> None:
    """Raise InputError if `path` exists, or its folder does not.

    force: an existing file may be replaced, if it is empty or begins with `magic`, as files of a `kind` do.
    """
    check_parent(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no file that could be replaced")  # /dev/null, say
    if magic and path.exists():
        with _explained(path), open(path, "rb") as old:
            if (head := old.read(len(magic))) and head != magic:
                raise InputError(f"{path} is no {kind}: choose another name")
    if path.exists() and not force:
        raise InputError(f"{path} is there already: --force replaces it")


def check_folder(folder: Path, ours: Callable[[Path], bool], *, force: bool) -> None:
    """Raise InputError if `folder` exists, or its parent does not. force: a folder that is `ours` may be replaced."""
    check_parent(folder)
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder} is there and no folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not ours(folder):
            raise InputError(f"{folder} holds other files: choose a new folder")
        if not force:
            raise InputError(f"{folder} is there already: --force replaces it")


def check_writable(path: Path) -> None:
    """Raise in advance the InputError that `write_whole` would raise."""
    check_file(path, force=True)
    with _explained(path), _temporary(path, folder=False):
        pass


def write_whole(path: Path, text: str) -> None:
    """Write a text file atomically. Surrogates, which undecodable file names contain, become `?`. Raises InputError."""
    check_file(path, force=True)
    with new_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="replace")


@contextmanager
def new_file(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty file beside `path`, which replaces it if the block ends well. Raises InputError.

    private: readable by this user alone, whatever the umask.
    """
    with _explained(path), _temporary(path, folder=False, private=private) as temporary:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder beside `folder`, which replaces it if the block ends well. Raises InputError.

    A folder that existed before is exchanged atomically; one that another process creates meanwhile stays.
    """
    folder = folder.absolute()
    replaces = folder.is_dir()
    with _explained(folder), _temporary(folder, folder=True) as temporary:
        yield temporary
        for path in temporary.rglob("*"):
            if path.is_file():
                _sync(path)
        if not (replaces and folder.is_dir()):
            os.replace(temporary, folder)
        elif not _exchange(temporary, folder):
            _replace_folder(temporary, folder)


@contextmanager
def work_folder(target: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder, removed afterwards: on the file system of `target`, or the system's own, for this user
    alone.

    Raises InputError.
    """
    import tempfile

    beside = target or Path(tempfile.gettempdir()).absolute() / "work"
    with _explained(beside), _temporary(beside, folder=True, private=target is None) as temporary:
        yield temporary


def sweep(folder: Path) -> int:
    """Remove the temporary files of killed processes from a folder; return the bytes freed."""
    freed = 0
    with suppress(OSError):
        for name in os.listdir(folder):
            if match := re.fullmatch(_OURS, name, re.DOTALL):
                freed += _remove_left(folder / name, folder / match["name"] if name.startswith(_OLD) else None)
    return freed


@contextmanager
def held(path: Path) -> Iterator[bool | None]:
    """Lock a file or folder, so that other processes see that it is in use.

    Yields False if another process holds the lock, None where files have no locks. Raises OSError if the path is
    missing.
    """
    descriptor = _open(path)
    try:
        yield _lock(descriptor)
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def _temporary(target: Path, *, folder: bool, private: bool = False) -> Iterator[Path]:
    """Yield an empty, locked file or folder beside `target`, removed afterwards. Raises OSError, InputError."""
    check_parent(target)
    target = target.absolute()
    sweep(target.parent)
    claims: list[_Claim] = []
    try:
        yield _claim(target, folder, private, claims)
    finally:
        for claim in claims:
            _remove(claim.path)  # it exists only if something failed
            if claim.descriptor is not None:
                os.close(claim.descriptor)


@dataclass
class _Claim:
    """A temporary file or folder and its locked descriptor. Noted before the path exists, so that an interrupt between
    two lines leaves nothing behind."""

    path: Path
    descriptor: int | None = None


def _claim(target: Path, folder: bool, private: bool, claims: list[_Claim]) -> Path:
    """Create and lock a file or folder; create another if a sweeping process removed it first. Notes it in `claims`."""
    name = os.fsdecode(os.fsencode(target.name)[-_NAME_BYTES:])
    while True:
        path = target.with_name(f"{_TEMPORARY}{os.urandom(4).hex()}-{name}")
        claim = _Claim(path)
        claims.append(claim)
        try:
            if folder:
                path.mkdir(0o700 if private else 0o777)
            else:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
        except FileExistsError:  # another process's
            claims.remove(claim)
            continue
        with suppress(FileNotFoundError):
            claim.descriptor = _open(path)
            if _lock(claim.descriptor) is not False and path.exists():
                return path


def _replace_folder(made: Path, folder: Path) -> None:
    """Replace a folder in two steps, where folders cannot be exchanged; the next `sweep` repairs a crash between
    them."""
    old = folder.with_name(f"{_OLD}{os.urandom(4).hex()}-{folder.name}")
    with held(folder):
        os.rename(folder, old)
        try:
            os.rename(made, folder)
        except BaseException:
            os.rename(old, folder)
            raise
        _remove(old)


def _exchange(one: Path, other: Path) -> bool:
    """Swap the names of two folders atomically. False where the system cannot. Raises OSError."""
    if sys.platform != "linux":
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def _remove_left(path: Path, target: Path | None) -> int:
    """Remove an unlocked temporary file or folder; return its bytes. target: its old path, restored if missing."""
    with suppress(OSError), held(path) as free:
        status = os.lstat(path)
        if free and (not hasattr(os, "geteuid") or status.st_uid == os.geteuid()):
            if target is not None and not target.exists():
                os.rename(path, target)
                return 0
            size = status.st_size if stat.S_ISREG(status.st_mode) else _bytes_of(path)
            _remove(path)
            return size
    return 0


def _bytes_of(folder: Path) -> int:
    return sum(each.lstat().st_size for each in folder.rglob("*") if each.is_file() and not each.is_symlink())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        import shutil

        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _open(path: Path) -> int | None:
    """Open a path for locking; None where there are no locks. Raises OSError."""
    if sys.platform == "win32":
        return None
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)


def _lock(descriptor: int | None) -> bool | None:
    """Lock an open file. False if another process has the lock; None if the file system has no locks."""
    if descriptor is None or sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _sync(path: Path) -> None:
    with open(path, "rb") as written:
        os.fsync(written.fileno())


@contextmanager
def _explained(path: Path, but: type[OSError] | tuple[()] = ()) -> Iterator[None]:
    try:
        yield
    except but:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None
