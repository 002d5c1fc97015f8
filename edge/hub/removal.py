"""Removal of files from the Hub's cache folder, shared with other tools: blobs that other snapshots link stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from edge.errors import CacheError, InputError
from edge.hub.cache import explained
from edge.storage.lock import file_lock


def remove_cached(path: Path) -> tuple[tuple[Path, ...], int]:
    """Remove a file from its snapshot, and its blob unless another snapshot links it; return the paths and the bytes
    freed.

    Raises InputError while the file is being downloaded, CacheError if it cannot be removed.
    """
    repository = next(parent for parent in path.parents if parent.name.startswith("models--"))
    snapshots, blob = repository / "snapshots", path.resolve()
    with explained(), _unlocked(repository, blob):
        size = blob.stat().st_size
        path.unlink()
        removed, freed = [path], size if blob == path else 0  # equal on a system without links
        if blob != path and blob.parent == (repository / "blobs").resolve() and not _is_linked(blob, snapshots):
            blob.unlink()
            removed, freed = [path, blob], size
        _sweep(repository, path.parent)
    return tuple(removed), freed


def _is_linked(blob: Path, snapshots: Path) -> bool:
    return any(other.is_symlink() and other.resolve() == blob for other in snapshots.rglob("*"))


def _sweep(repository: Path, folder: Path) -> None:
    """Remove empty folders; with the last snapshot, also the repository's refs."""
    snapshots, blobs = repository / "snapshots", repository / "blobs"
    with suppress(OSError):  # not empty
        while folder != repository:
            folder.rmdir()
            folder = folder.parent
    if not snapshots.exists() and not any(blobs.glob("*")):
        for ref in (repository / "refs").rglob("*"):
            if ref.is_file():
                ref.unlink()
        for empty in sorted((each for each in repository.rglob("*") if each.is_dir()), reverse=True):
            empty.rmdir()
        with suppress(OSError):  # another tool's file is there
            repository.rmdir()


@contextmanager
def _unlocked(repository: Path, blob: Path) -> Iterator[None]:
    """Hold the lock of a blob, as a download does. Raises InputError if another process holds it."""
    folder, holders = repository.parent / ".locks" / repository.name, list[str]()
    if not folder.is_dir():
        yield
        return
    try:
        with file_lock(folder / f"{blob.name}.lock", longest=0, waiting=holders.append):
            yield
    except CacheError:
        if not holders:
            raise
        raise InputError(
            f"process {holders[0] or '?'} is downloading this file: let it finish, or end it, then remove the model"
        ) from None
