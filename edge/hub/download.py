"""Download of a file into the Hub's cache: resumed by Range, hashed while streaming, one process at a time.

huggingface_hub (2.4, tried on the tests' faulty server) fills the same cache, but stores a damaged file under the hash
of the whole one, resumes at multiples of 10 MiB alone, and its errors are tracebacks of httpx.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, BinaryIO

from edge.budget import format_bytes
from edge.errors import CacheError, DownloadError
from edge.hub import cache
from edge.hub.http import CutError, RefusedError, blocks, opened, patiently
from edge.hub.repository import RemoteFile, Repository, explained
from edge.hub.settings import hub_cache

OnBytes = Callable[[int, int], None]  # bytes downloaded, bytes of the file
Notice = Callable[[str], None]  # a line for the user

_BLOCK = 1 << 20  # bytes of a part that are read at a time
_SPARE = 16 << 20  # bytes that a download leaves free on the disk
_SHA256_DIGITS = 64
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_TOO_FAR = 416  # the status for a range beyond the end


def download(
    repository: Repository,
    file: RemoteFile,
    *,
    progress: OnBytes = lambda done, total: None,
    notice: Notice = lambda line: None,
) -> Path:
    """Download a file, or continue an interrupted download; return its path in its snapshot. An existing file is
    kept.

    An interruption leaves a part that the next call continues. A file whose hash differs from the Hub's is deleted.
    Raises DownloadError, CacheError.
    """
    pointer, blob = cache.pointer_of(repository, file), cache.blob_of(repository, file)

    def waiting(holder: str) -> None:
        notice(f"process {holder or '?'} downloads {file.path}: waiting for it")

    with cache.explained():
        blob.parent.mkdir(parents=True, exist_ok=True)
        with cache.locked(repository, file, waiting):
            if not is_here(blob, file):
                with explained(repository.name, repository.revision):
                    _fetch(repository, file, blob, progress, notice)
            progress(file.size, file.size)
            if not is_here(pointer, file):
                cache.link(repository, file)
    return pointer


def download_each(
    repository: Repository, files: Sequence[RemoteFile], *, progress: OnBytes, notice: Notice
) -> Iterator[Path]:
    """Download files one by one, as `download` does. progress: counts the bytes of all files together."""
    total, before = sum(file.size for file in files), 0
    for file in files:
        yield download(repository, file, progress=partial(_report, progress, before, total), notice=notice)
        before += file.size


def _report(progress: OnBytes, before: int, total: int, done: int, _of_file: int) -> None:
    progress(before + done, total)


def is_here(path: Path, file: RemoteFile) -> bool:
    """Whether a file of that size exists; edge and huggingface_hub move only complete files there."""
    return path.is_file() and path.stat().st_size == file.size


def read_bytes(repository: Repository, file: RemoteFile, start: int, stop: int, out: IO[bytes]) -> None:
    """Append bytes `start` to `stop` of a remote file to `out`. Raises DownloadError, and OSError of `out`."""
    at = start

    def step() -> None:
        nonlocal at
        with opened(repository.url_of(file), at, stop) as response:
            if response.status != 206:
                raise DownloadError(f"{repository.name}: the server does not send parts of files (Range)")
            for block in blocks(response):
                out.write(block[: stop - at])
                at = min(stop, at + len(block))
                if at == stop:
                    return
        raise CutError(f"the connection ended after {format_bytes(at)} of {file.path}")

    with explained(repository.name, repository.revision):
        patiently(step, lambda: at)


def _fetch(repository: Repository, file: RemoteFile, blob: Path, progress: OnBytes, notice: Notice) -> None:
    """Download to `blob`.incomplete, then rename it to `blob`. Raises as `download`, OSError, RefusedError."""
    path = blob.with_name(f"{blob.name}.incomplete")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    with os.fdopen(descriptor, "r+b") as out:
        part = _Part(repository, file, out, progress)
        part.read()
        free = shutil.disk_usage(blob.parent).free
        if free < file.size - part.done + _SPARE:
            raise CacheError(
                f"{hub_cache()} has {format_bytes(free)} left, and {format_bytes(file.size - part.done + _SPARE)} are "
                f"needed for {file.path}: free space there, or set HF_HOME to a folder with more room"
            )
        patiently(part.receive, lambda: part.done, notice)
        out.flush()
        os.fsync(out.fileno())
        found = part.digest.hexdigest()
    if found != file.hash:
        path.unlink()
        raise DownloadError(
            f"{repository.name}/{file.path} is damaged: its hash is {found}, the Hub lists {file.hash}; what came was "
            "deleted, so try again"
        )
    os.replace(path, blob)


class _Part:
    """The downloaded beginning of a file, on disk and hashed."""

    def __init__(self, repository: Repository, file: RemoteFile, out: BinaryIO, progress: OnBytes) -> None:
        self._url, self._file, self._out, self._progress = repository.url_of(file), file, out, progress
        self.done, self.digest = 0, _digest_of(file)

    def _begin(self) -> None:
        self._out.seek(0)
        self._out.truncate()
        self.done, self.digest = 0, _digest_of(self._file)

    def read(self) -> None:
        """Hash the part that an earlier download left."""
        self._out.seek(0)
        while block := self._out.read(_BLOCK):
            self.digest.update(block)
            self.done += len(block)
        self._progress(min(self.done, self._file.size), self._file.size)

    def receive(self) -> None:
        """Receive the rest of the file. Raises CutError if the connection ends early, DownloadError, RefusedError."""
        size = self._file.size
        if self.done > size:
            self._begin()
        if self.done == size:
            return
        try:
            self._receive()
        except RefusedError as error:
            if error.status != _TOO_FAR or not self.done:
                raise
            self._begin()  # the part is not of this file
            self._receive()
        if self.done < size:
            raise CutError(f"the connection ended after {format_bytes(self.done)} of {format_bytes(size)}")

    def _receive(self) -> None:
        with opened(self._url, self.done) as response:
            at, total = 0, response.headers.get("Content-Length")
            if response.status == 206 and (match := _RANGE.match(response.headers.get("Content-Range") or "")):
                at, total = int(match[1]), match[2]
            if at not in (0, self.done):
                raise DownloadError(f"{self._file.path}: the server sends other bytes than those that were asked for")
            if total not in (None, "*", str(self._file.size)):
                raise DownloadError(
                    f"{self._file.path} has {total} bytes, the Hub lists {self._file.size}: try again later"
                )
            if at != self.done:  # a server without Range sends the whole file
                self._begin()
            for block in blocks(response):
                block = block[: self._file.size - self.done]
                self._out.write(block)
                self.digest.update(block)
                self.done += len(block)
                self._progress(self.done, self._file.size)
                if self.done == self._file.size:
                    return


def _digest_of(file: RemoteFile) -> hashlib._Hash:
    """A SHA-256 hash, or git's blob hash: SHA-1 of length and content."""
    if len(file.hash) == _SHA256_DIGITS:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
