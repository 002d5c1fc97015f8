"""What a converter writes appears whole or not at all, and replaces nothing unasked."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from edge.errors import InputError


def check_file(path: Path, *, force: bool) -> None:
    """Raises InputError if `path` is in the way; force: a file may be replaced."""
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file")
    if path.exists() and not path.is_file():
        raise InputError(f"{path} is no file that could be replaced")  # /dev/null, say
    if path.exists() and not force:
        raise InputError(f"{path} is there already: --force replaces it")


def check_folder(folder: Path, ours: Callable[[Path], bool], *, force: bool) -> None:
    """Raises InputError if `folder` is in the way; force: one that is `ours` may be replaced."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"{folder} is there and no folder")
    if folder.is_dir() and any(folder.iterdir()):
        if not ours(folder):
            raise InputError(f"{folder} holds other files: choose a new folder")
        if not force:
            raise InputError(f"{folder} is there already: --force replaces it")


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place if the block ends well. Raises InputError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            _sync(temporary)
            temporary.chmod(0o644)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)  # it is there only if something failed
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes its place if the block ends well. Raises InputError."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            yield temporary
            for path in temporary.iterdir():
                _sync(path)
            temporary.chmod(0o755)
            if folder.is_dir():
                old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
                os.replace(folder, old)
                os.replace(temporary, folder)
                shutil.rmtree(old, ignore_errors=True)
            else:
                os.replace(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)  # it is there only if something failed
    except OSError as error:
        raise InputError(f"{folder} cannot be written ({error.strerror})") from None


def _sync(path: Path) -> None:
    with open(path, "rb") as written:
        os.fsync(written.fileno())
