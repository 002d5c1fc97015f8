"""The hash of a model's file: read once, remembered, and never that of another content."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from small_models import Small, write_small

from edge.backends.kv_cache import state_key
from edge.errors import InputError
from edge.lab.quality.material import identity_of
from edge.model.model import open_model
from edge.storage import fingerprint as module
from edge.storage.cache import clear, entries
from edge.storage.fingerprint import fingerprint, hash_file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of these tests are seconds old; now they pass for older."""
    monkeypatch.setattr(module, "_TICK", -1)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_small(tmp_path / "model.gguf", Small())


def change_in_place(path: Path, at: int = -8) -> None:
    """One byte, with size and time kept, later than the clock of files ticks."""
    before, content = path.stat(), bytearray(path.read_bytes())
    content[at] ^= 0x40
    while path.stat().st_ctime_ns == before.st_ctime_ns:
        with open(path, "r+b") as file:
            file.write(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def count_readings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    read: list[Path] = []

    def counting(path: Path, progress: Callable[[float], None] | None = None) -> str:
        read.append(path)
        return hash_file(path, progress)

    monkeypatch.setattr(module, "hash_file", counting)
    return read


@pytest.mark.usefixtures("old")
def test_folder_that_cannot_be_written_only_costs_time(model: Path, folder: Path) -> None:
    folder.touch()
    assert fingerprint(model).sha256 == hashlib.sha256(model.read_bytes()).hexdigest()


@pytest.mark.usefixtures("old")
def test_file_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_readings(monkeypatch)
    assert fingerprint(model) == fingerprint(model)
    assert read == [model]
    clear("hashes")
    fingerprint(model)
    assert read == [model] * 2


@pytest.mark.usefixtures("old")
def test_in_place_change_is_seen(model: Path) -> None:
    before = fingerprint(model)
    change_in_place(model)
    assert fingerprint(model).sha256 == hashlib.sha256(model.read_bytes()).hexdigest() != before.sha256


def test_file_that_was_just_written_is_not_remembered(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = count_readings(monkeypatch)
    model.touch()
    now = model.stat().st_ctime_ns
    monkeypatch.setattr(time, "time_ns", lambda: now)
    assert fingerprint(model).sha256 == fingerprint(model).sha256
    assert len(read) == 2
    assert entries("hashes") == []
    now += 3_000_000_000  # a change in its first seconds would have shown in its times by now
    fingerprint(model)
    fingerprint(model)
    assert len(read) == 3


def test_change_meanwhile_is_error(model: Path) -> None:
    found = fingerprint(model)
    found.check()
    change_in_place(model)
    with pytest.raises(InputError, match=r"model\.gguf changed while edge read it: try again"):
        found.check()
    with pytest.raises(InputError, match="changed while"):
        fingerprint(model, lambda done: change_in_place(model))
    model.unlink()
    with pytest.raises(InputError, match="cannot be read"):
        fingerprint(model)


@pytest.mark.usefixtures("old")
def test_packed_weights_rows_and_measurements_match_whole_file(model: Path) -> None:
    """A change in the last bytes, which are the middle of no tensor."""
    weights = pytest.importorskip("edge.backends.tvm.packing.weights")
    from edge.backends.tvm.packing.layout import make_layout

    keys = []
    for turn in (1, 2):
        opened = open_model(model)
        weights.open_weights(opened.file, make_layout(opened.file, opened.spec))
        assert len(entries("weights")) == turn
        rows = state_key("any", opened.file, opened.spec, "f16")
        keys.append((rows, identity_of(opened, "reference")["model_sha256"]))
        change_in_place(model)
    assert keys[0][0] != keys[1][0]
    assert keys[0][1] != keys[1][1]
