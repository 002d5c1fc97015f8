"""The blocks of `tree.py` on disk, one file each, so that a prompt's rows outlive the process.

A file is named `PARENT-NAME.kv` after the prefix before the block and the prefix that ends with it, so a lookup needs
no index. Files are not trusted: a block is used only if its lengths and checksum are right. Files are written
under a temporary name and renamed, with the folder locked against other writers; readers need no lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edge.devices.keys import blake2b
from edge.devices.private import is_private_file, make_private_folder, read_private
from edge.errors import InputError
from edge.prompt_cache.tree import BLOCK, Block, agreement, prefix_name
from edge.records import dataclass
from edge.storage.completion import replacement, status_of
from edge.storage.lock import file_lock
from edge.types import IntArray

_HEAD = struct.Struct("<8s16sIQ")  # magic, checksum, tokens, bytes of data; tokens and data follow
_MAGIC = b"edge-kv1"
_FILE = re.compile(r"(?P<parent>[0-9a-f]{24})-(?P<name>[0-9a-f]{24})\.kv")
_TEMPORARY = re.compile(rf"\.\d+-\w+-{_FILE.pattern}")
_LOCK = ".lock"
_LINE = 512  # 64-bit words in a row of the matrix that the checksum sums
_MOST_TRIED = 64  # files after one prefix whose tokens are compared

_log = logging.getLogger("edge")


@dataclass(frozen=True)
class _Entry:
    path: Path
    parent: str
    name: str
    size: int
    used: int  # nanoseconds since 1970


class BlockFiles:
    """A folder of blocks, at most `limit` bytes, created for this user alone.

    Raises InputError if the folder cannot be made or read.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._kept: set[Path] = set()  # blocks of the prompt being written, which its later blocks must not evict
        try:
            make_private_folder(folder)
            os.listdir(folder)
        except OSError as error:
            why = "is a file: name a folder" if folder.is_file() else f"cannot be used: {error.strerror}"
            raise InputError(f"the prompt cache {folder} {why}") from None

    def find(self, parent: str, tokens: IntArray) -> Block | None:
        """The block after `parent` that shares the longest prefix with `tokens`, or None. Counts as a use."""
        whole = self._path(parent, tokens[:BLOCK])
        if block := self._read(whole):
            return block
        for path, _ in self._alike(parent, tokens):
            if (block := self._read(path)) and block.agreement(tokens):
                return block
        return None

    def has(self, parent: str, tokens: IntArray) -> bool:
        """Whether a block after `parent` begins with all of `tokens` (at most BLOCK). Counts as a use; content is not
        checked."""
        path = self._path(parent, tokens)
        if not is_private_file(status_of(path)):
            longer = [path for path, same in self._alike(parent, tokens) if same == tokens.size]
            if not longer:
                return False
            path = longer[0]
        self._kept.add(path)
        with contextlib.suppress(OSError):
            os.utime(path)
        return True

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock out other writers while a prompt's blocks are stored. Raises OSError."""
        with file_lock(self.folder / _LOCK):
            self._kept = set()
            for each in os.listdir(self.folder):  # the folder is locked, so these are left over from crashes
                if _TEMPORARY.fullmatch(each):
                    with contextlib.suppress(OSError):  # a folder of such a name is not ours
                        (self.folder / each).unlink()
            yield

    def put(self, block: Block) -> bool:
        """Write a block; requires `writing`. False if the limit leaves no room for it. Raises OSError."""
        tokens = np.ascontiguousarray(block.tokens, np.int32)
        size = _HEAD.size + tokens.nbytes + len(block.data)
        siblings = [each for each in self._entries() if each.parent == block.parent]
        if not self._make_room(size):
            return False
        path = self._path(block.parent, tokens)
        head = _HEAD.pack(_MAGIC, _checksum(block), tokens.size, len(block.data))
        with replacement(path) as temporary, open(temporary, "wb") as file:
            file.writelines((head, tokens.data, block.data))
        self._kept.add(path)
        for each in siblings:  # shorter blocks with the same beginning are now superfluous
            shorter = _tokens_of(each.path)
            if 0 < shorter.size < tokens.size and agreement(shorter, tokens) == shorter.size:
                each.path.unlink(missing_ok=True)
        return True

    def drop(self, block: Block) -> None:
        with contextlib.suppress(OSError):
            self._path(block.parent, block.tokens).unlink()

    def _path(self, parent: str, tokens: IntArray) -> Path:
        return self.folder / f"{parent}-{prefix_name(parent, tokens)}.kv"

    def _entries(self) -> list[_Entry]:
        """All files of blocks."""
        found = []
        for each in os.listdir(self.folder):
            match, status = _FILE.fullmatch(each), status_of(self.folder / each)
            if match and status and is_private_file(status):
                path = self.folder / each
                found.append(_Entry(path, match["parent"], match["name"], status.st_size, status.st_mtime_ns))
        return found

    def _alike(self, parent: str, tokens: IntArray) -> list[tuple[Path, int]]:
        """Files after `parent` that share a prefix with the tokens, with its length, longest first; content is not
        checked."""
        with contextlib.suppress(OSError):
            paths = [self.folder / each for each in os.listdir(self.folder) if each.startswith(f"{parent}-")]
            found = [(path, agreement(_tokens_of(path), tokens)) for path in paths[:_MOST_TRIED]]
            return sorted((each for each in found if each[1]), key=lambda each: each[1], reverse=True)
        return []

    def _read(self, path: Path) -> Block | None:
        """Read a block; None if there is none. A damaged file is removed, with a warning."""
        match, status = _FILE.fullmatch(path.name), status_of(path)
        if match is None or status is None:
            return None
        if not is_private_file(status):
            _log.warning("ignored a file of the prompt cache that others may have written: %s", path)
            return None
        content = _content(path, _HEAD.size)
        if _is_sound(content, status.st_size):  # before the whole file is read into memory
            content = _content(path, status.st_size)
        if status.st_size and not content:
            return None  # another process has just removed it, and may have written it again
        block = _parse(content, match["parent"])
        if block is None or block.name != match["name"]:
            _log.warning("ignored a damaged file of the prompt cache: %s", path)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):  # a read-only folder suffices
            os.utime(path)
        return block

    def _make_room(self, size: int) -> bool:
        """Remove the least recently used blocks, leaves before their parents, until `size` more bytes fit."""
        entries = self._entries()
        while sum(entry.size for entry in entries) + size > self.limit:
            parents = {entry.parent for entry in entries}
            leaves = (entry for entry in entries if entry.name not in parents and entry.path not in self._kept)
            oldest = min(leaves, key=lambda entry: entry.used, default=None)
            if oldest is None:
                return False
            oldest.path.unlink(missing_ok=True)
            entries.remove(oldest)
        return True


def _parse(content: bytes, parent: str) -> Block | None:
    """Parse a file; None unless every length and the checksum are right."""
    if not _is_sound(content, len(content)):
        return None
    _, checksum, count, _ = _HEAD.unpack_from(content)
    start = _HEAD.size + 4 * count
    block = Block(parent, np.frombuffer(content, np.int32, count, _HEAD.size), memoryview(content)[start:])
    return block if _checksum(block) == checksum else None


def _is_sound(head: bytes, length: int) -> bool:
    """Whether a file that begins with `head` has the length that its header implies."""
    if len(head) < _HEAD.size:
        return False
    magic, _, count, size = _HEAD.unpack_from(head)
    return bool(magic == _MAGIC and 1 <= count <= BLOCK and length == _HEAD.size + 4 * count + size)


def _checksum(block: Block) -> bytes:
    """The checksum of a block.

    Data are first summed by rows and by columns, which takes a tenth of the time of checksumming every byte. Accidental
    damage does not leave both kinds of sums unchanged.
    """
    words = np.frombuffer(block.data, np.uint64, len(block.data) // 8)
    lines = words[: words.size // _LINE * _LINE].reshape(-1, _LINE)
    digest = blake2b(f"{block.parent} {len(block.data)}".encode(), digest_size=16)
    digest.update(np.ascontiguousarray(block.tokens, np.int32).tobytes())
    digest.update(lines.sum(axis=0, dtype=np.uint64).tobytes() + lines.sum(axis=1, dtype=np.uint64).tobytes())
    digest.update(memoryview(block.data)[8 * lines.size :])
    return digest.digest()


def _tokens_of(path: Path) -> IntArray:
    """The tokens of a file; empty if it is damaged."""
    head = _content(path, _HEAD.size + 4 * BLOCK)
    if len(head) < _HEAD.size:
        return np.zeros(0, np.int32)
    count = _HEAD.unpack_from(head)[2]
    return np.frombuffer(head[_HEAD.size :], np.int32, min(count, (len(head) - _HEAD.size) // 4))


def _content(path: Path, most: int) -> bytes:
    """At most `most` bytes from the start of a private file; empty if there is none."""
    with contextlib.suppress(OSError):
        return read_private(path, most)
    return b""
