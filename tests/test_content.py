"""Hashes of files: of what they contain now, whatever their times say."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from edge import cache
from edge.content import content_hash
from edge.errors import ModelFormatError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("edge.content._SETTLED_NS", 0)  # a test does not wait for clocks
    return tmp_path / "cache"


def reads_of(path: Path) -> tuple[str, int]:
    """The hash, and how many blocks were read for it."""
    read: list[float] = []
    return content_hash(path, read.append), len(read)


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path, content = tmp_path / "model", os.urandom((2 << 20) + 5)
    path.write_bytes(content)
    wanted = hashlib.sha256(content).hexdigest()
    assert [reads_of(path), reads_of(path)] == [(wanted, 3), (wanted, 0)]
    os.link(path, tmp_path / "other name")
    assert reads_of(tmp_path / "other name")[0] == wanted


def test_a_file_changed_in_place_with_its_size_and_time_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"one")
    before = path.stat()
    first = content_hash(path)
    with open(path, "r+b") as file:
        file.write(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert content_hash(path) == hashlib.sha256(b"two").hexdigest() != first


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It might be written again within a tick of the clock, and keep both times."""
    monkeypatch.setattr("edge.content._SETTLED_NS", 3600 * 10**9)
    path = tmp_path / "model"
    path.write_bytes(b"one")
    assert [reads_of(path)[1], reads_of(path)[1]] == [1, 1]


def test_what_is_remembered_and_damaged_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(b"one")
    wanted = content_hash(path)
    (entry,) = cache.entries()
    with cache.create(entry.kind, entry.key, ".sha256") as temporary:
        temporary.write_text("no hash")
    assert reads_of(path) == (wanted, 1)


def test_a_folder_that_cannot_be_written_costs_another_reading(tmp_path: Path, folder: Path) -> None:
    folder.write_text("in the way")
    path = tmp_path / "model"
    path.write_bytes(b"one")
    assert [reads_of(path)[1], reads_of(path)[1]] == [1, 1]


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a regular file"), ("", "cannot be read"), ("none", "cannot be read")):
        with pytest.raises(ModelFormatError, match=message):
            content_hash(tmp_path / name)


def test_a_file_that_grows_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(bytes(3 << 20))

    def grow(done: float) -> None:
        with open(path, "ab") as file:
            file.write(b"more")

    with pytest.raises(ModelFormatError, match="changed while it was read"):
        content_hash(path, grow)
