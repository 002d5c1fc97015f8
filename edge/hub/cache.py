"""The Hub's cache folder, as huggingface_hub lays it out and other tools read it.

models--USER--REPO/blobs/HASH                    contents, by the hash that the Hub lists
                  /refs/main                     the commit of a branch when the Hub was last asked
                  /snapshots/COMMIT/PATH         links to ../../blobs/HASH
.locks/models--USER--REPO/HASH.lock              held while a blob is written
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from edge.errors import CacheError
from edge.formats.gguf_parts import names_of_parts, whole_name
from edge.hub.names import Reference, is_commit, is_repository
from edge.hub.quants import best_first, label_of, matches, with_joined
from edge.hub.repository import RemoteFile, Repository
from edge.hub.settings import hub_cache
from edge.storage import cache
from edge.storage.lock import file_lock

_LONGEST_LOCK_S = 48 * 3600.0  # a large model over a slow line
_LONGEST_REF = 200  # bytes of a file that holds a commit


@dataclass(frozen=True)
class CachedFile:
    """A GGUF file in the cache."""

    repository: str
    commit: str
    file: str
    path: Path  # the link in its snapshot
    bytes: int
    last_used: float  # seconds since 1970


def find_cached(reference: Reference) -> Path | None:
    """The best cached file that matches a reference, or None; the Hub is not asked."""
    folder = _snapshot(reference)
    if folder is None:
        return None
    if reference.file is not None:
        path = folder / reference.file
        if not names_of_parts(path.name):
            return path if path.is_file() else None
    found = {path.relative_to(folder).as_posix(): path for path in _gguf_files(folder)}
    files = with_joined([RemoteFile(name, path.stat().st_size, path.resolve().name) for name, path in found.items()])
    if reference.file is not None:
        files = [file for file in files if file.path == whole_name(reference.file)]
    fitting = [file for file in files if reference.quant is None or matches(label_of(file.path), reference.quant)]
    paths = (
        cache.find("models", file.hash, ".gguf") if file.parts else found[file.path] for file in best_first(fitting)
    )
    return next(filter(None, paths), None)


def cached_files() -> list[CachedFile]:
    """All GGUF files in the cache, from any tool; last used first."""
    found = []
    for folder in hub_cache().glob("models--*--*"):
        name = folder.name.removeprefix("models--").replace("--", "/")
        if not is_repository(name):
            continue
        for path in _gguf_files(folder / "snapshots"):
            commit, _, file = path.relative_to(folder / "snapshots").as_posix().partition("/")
            if file and is_commit(commit):
                status = path.stat()
                used = max(status.st_atime, status.st_mtime)
                found.append(CachedFile(name, commit, file, path, status.st_size, used))
    return sorted(found, key=lambda each: -each.last_used)


def pointer_of(repository: Repository, file: RemoteFile) -> Path:
    """The path of a file in its snapshot."""
    return _folder(repository.name) / "snapshots" / repository.commit / file.path


def blob_of(repository: Repository, file: RemoteFile) -> Path:
    """The path of a file's content."""
    return _folder(repository.name) / "blobs" / file.hash


def link(repository: Repository, file: RemoteFile) -> Path:
    """Link a blob into its snapshot, and update its branch's ref; return its path there. Raises OSError."""
    pointer, blob = pointer_of(repository, file), blob_of(repository, file)
    pointer.parent.mkdir(parents=True, exist_ok=True)
    with _beside(pointer) as temporary:
        try:
            os.symlink(os.path.relpath(blob, pointer.parent), temporary)
        except OSError:  # Windows allows links to administrators only
            try:
                os.link(blob, temporary)
            except OSError:
                shutil.copyfile(blob, temporary)
    if repository.revision != repository.commit:
        ref = _folder(repository.name) / "refs" / repository.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        with _beside(ref) as temporary:
            temporary.write_text(repository.commit, encoding="ascii")
    return pointer


@contextmanager
def locked(repository: Repository, file: RemoteFile, waiting: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a blob, shared with huggingface_hub. waiting: called once if another process holds it, with its
    id.

    Raises CacheError, OSError.
    """
    place = hub_cache() / ".locks" / _folder(repository.name).name
    place.mkdir(parents=True, exist_ok=True)
    with file_lock(place / f"{file.hash}.lock", longest=_LONGEST_LOCK_S, waiting=waiting):
        yield


@contextmanager
def explained() -> Iterator[None]:
    """Convert OSErrors of the cache folder into a CacheError."""
    try:
        yield
    except OSError as error:
        raise CacheError(
            f"the Hub's cache folder {hub_cache()} cannot be written ({error.strerror}): free space there, or set "
            "HF_HOME to a folder with room that you can write"
        ) from None


def _folder(name: str) -> Path:
    return hub_cache() / f"models--{name.replace('/', '--')}"


def _snapshot(reference: Reference) -> Path | None:
    """The folder of a reference's commit, if the cache knows it."""
    folder, commit = _folder(reference.repository), reference.revision
    if not is_commit(commit):
        with suppress(OSError, ValueError), open(folder / "refs" / reference.revision, encoding="ascii") as file:
            commit = file.read(_LONGEST_REF).strip()
    return folder / "snapshots" / commit if is_commit(commit) else None


def _gguf_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.gguf") if path.is_file())


@contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """A free name beside `path`, for a file that will replace it."""
    temporary = path.with_name(f".{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
