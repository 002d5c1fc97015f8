"""The cache folder: what it hands out is whole, whatever happened to the disk or to other processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from test_cli import edge_here as run_edge
from test_cli import json_here as edge_json

from edge.devices.platform import system_folder
from edge.errors import CacheError
from edge.storage.cache import clear, create, entries, find, lock
from edge.storage.lock import file_lock

KEY, OTHER, THIRD = "00" * 16, "a1" * 16, "b2" * 16
TWO_DAYS = 2 * 86_400


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EDGE_CACHE_LIMIT", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / "cache"


def make(key: str = KEY, content: bytes = b"0123456789", about: str = "tiny model") -> Path:
    with create("weights", key, ".bin", about) as temporary:
        temporary.write_bytes(content)
    return find("weights", key, ".bin")


def make_half(exception: type[BaseException]) -> None:
    with create("weights", KEY, ".bin") as temporary:
        temporary.write_bytes(b"half")
        raise exception


def record_of(path: Path) -> Path:
    return path.with_name(path.name + ".ok")


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if not path.is_dir())


def age(path: Path, seconds: float) -> None:
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


def flip_a_byte(path: Path) -> None:
    with open(path, "r+b") as file:
        first = file.read(1)[0]
        file.seek(0)
        file.write(bytes([first ^ 1]))


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    code = "import os, sys\nfrom edge.storage.cache import create, find, lock\n" + code
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def test_created_entries_are_found(folder: Path) -> None:
    assert find("weights", KEY, ".bin") is None
    make(content=b"old")
    path = make()
    assert path.read_bytes() == b"0123456789"
    assert files(folder) == [f"{KEY}.bin", f"{KEY}.bin.ok"]
    for other in (find("kernels", KEY, ".bin"), find("weights", OTHER, ".bin"), find("weights", KEY, ".so")):
        assert other is None
    (entry,) = entries()
    assert (entry.kind, entry.key, entry.about, entry.bytes, entry.path) == ("weights", KEY, "tiny model", 10, path)
    with create("kernels", KEY, ".x86.so") as temporary:
        assert temporary.name.endswith(".x86.so")
        assert temporary.parent.name == "kernels"
        assert len(entries()) == 1
    if sys.platform != "win32":
        assert [each.stat().st_mode & 0o777 for each in (folder, folder / "weights")] == [0o700, 0o700]


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
@pytest.mark.parametrize("what", ["root", "kind"])
@pytest.mark.parametrize("mode", [0o777, 0o722, 0o702])
def test_folder_that_others_may_write_is_refused(folder: Path, what: str, mode: int) -> None:
    """Its files would run: a record can be made by anyone."""
    make()
    bad = folder if what == "root" else folder / "weights"
    bad.chmod(mode)
    message = rf"{bad} is not used, because other users may write to it \(mode {mode:04o}\).*EDGE_CACHE to another"
    for attempt in (make, entries, clear, lambda: find("weights", KEY, ".bin")):
        with pytest.raises(CacheError, match=message):
            attempt()
    bad.chmod(0o700)
    assert find("weights", KEY, ".bin") is not None


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away")
def test_entries_of_other_users_are_ignored(folder: Path) -> None:
    path = make()
    for each in (path, record_of(path)):
        os.chown(each, 4321, 4321)
        assert find("weights", KEY, ".bin") is None
        assert files(folder) == []  # the folder is ours, so its place is free for an entry of our own
        make()
    os.chown(folder / "weights", 4321, 4321)
    with pytest.raises(CacheError, match="weights is not used, because it belongs to another user"):
        find("weights", KEY, ".bin")


@pytest.mark.skipif(sys.platform == "win32", reason="no modes")
def test_writable_and_resized_entries_are_damage(folder: Path) -> None:
    damages: list[Callable[[Path], None]] = [
        lambda path: path.chmod(0o666), lambda path: record_of(path).chmod(0o666),
        *(lambda path, size=size: os.truncate(path, size) for size in (0, 9, 11)),
    ]  # fmt: skip
    for damage in damages:
        damage(make())
        assert find("weights", KEY, ".bin") is None
        assert files(folder) == []


@pytest.mark.parametrize("restore_time", [False, True])
def test_flipped_byte_is_damage(folder: Path, restore_time: bool) -> None:
    path = make()
    before = path.stat()
    moved = before.st_mtime_ns + (0 if restore_time else 1_000_000_000)
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files ticks every few ms
        os.utime(path, ns=(moved, moved))
    flip_a_byte(path)
    os.utime(path, ns=(moved, moved))
    assert find("weights", KEY, ".bin") is None
    assert files(folder) == []


def test_entries_without_a_valid_record_are_ignored(folder: Path) -> None:
    valid = b'{"size": 10, "mtime_ns": 0, "ctime_ns": 0, "crc32": 0, "about": ""}'
    for garbage in (
        None, b"", b"\xff\x00", b"{", b"[]", b"null", b"{}", b"[" * 5000, b'{"size": ' + b"9" * 5000 + b"}", valid,
        valid.replace(b'"crc32": 0', b'"crc32": "0"'), valid.replace(b'"crc32": 0', b'"crc32": NaN'),
        valid.replace(b'""', b"1"), valid.replace(b'""', b'"", "more": 1'), valid + b" " * 10_000,
    ):  # fmt: skip
        record = record_of(make())
        if garbage is None:
            record.unlink()
        else:
            record.write_bytes(garbage)
        assert find("weights", KEY, ".bin") is None
        assert files(folder) == []


@pytest.mark.parametrize("which", ["file", "record"])
def test_links_are_not_followed(folder: Path, which: str) -> None:
    path = make()
    linked = path if which == "file" else record_of(path)
    outside = folder.with_name("outside")
    linked.rename(outside)
    linked.symlink_to(outside)
    assert entries() == []
    assert find("weights", KEY, ".bin") is None
    assert files(folder) == []
    assert outside.exists()


@pytest.mark.parametrize(("kind", "key", "suffix"), [
    ("things", KEY, ".bin"), ("weights", "../../etc", ".bin"), ("weights", KEY.replace("0", "G"), ".bin"),
    ("weights", "", ".bin"), ("weights", KEY, "/../x"), ("weights", KEY, ".bin.ok"), ("weights", KEY, ""),
])  # fmt: skip
def test_names_that_might_leave_folder_are_refused(kind: Any, key: str, suffix: str) -> None:
    with pytest.raises(ValueError, match="not a cache entry"):
        find(kind, key, suffix)
    with pytest.raises(ValueError, match="not a cache entry"), create(kind, key, suffix):
        pass


@pytest.mark.parametrize("exception", [KeyboardInterrupt, RuntimeError, SystemExit, FileNotFoundError])
def test_interrupted_create_leaves_nothing(folder: Path, exception: type[BaseException]) -> None:
    with pytest.raises(exception):
        make_half(exception)
    assert files(folder) == []
    assert find("weights", KEY, ".bin") is None
    make(content=b"old")
    with pytest.raises(exception):
        make_half(exception)
    assert find("weights", KEY, ".bin").read_bytes() == b"old"


def test_leftovers_of_killed_processes_are_removed(folder: Path) -> None:
    for killed in ("create('weights', sys.argv[1], '.bin')", "lock('weights', sys.argv[1])"):
        with start(f"with {killed}: os._exit(1)", OTHER) as child:
            child.communicate(timeout=240)
    lock_file = folder / "weights" / f".{OTHER}.lock"
    (temporary,) = (folder / "weights").glob(f".*-{OTHER}.bin")
    ours = temporary.with_name(f".{os.getpid()}-random-{OTHER}.bin")  # of a living process: it may be at work
    ours.touch()
    foreign = temporary.with_name("notes.txt")
    foreign.touch()
    unrecorded = temporary.with_name(f"{THIRD}.bin")
    unrecorded.touch()
    assert entries() == []
    make()
    assert not temporary.exists()
    assert all(path.exists() for path in (lock_file, unrecorded))
    for path in (lock_file, ours, foreign, unrecorded):
        age(path, TWO_DAYS)
    make()
    assert files(folder) == sorted([ours.name, f"{KEY}.bin", f"{KEY}.bin.ok", "notes.txt"])


def test_young_leftovers_are_not_looked_for_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make()
    (folder / "weights" / f"{OTHER}.bin.ok").touch()  # of a file that is not there, as of a process that was killed
    monkeypatch.delattr("edge.storage.cache._sweep")
    make(THIRD)


def test_least_recently_used_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make(KEY), make(OTHER)
    age(record_of(first), 300)
    age(record_of(second), 200)
    assert [entry.key for entry in entries()] == [OTHER, KEY]
    assert find("weights", KEY, ".bin") == first  # a use
    assert [entry.key for entry in entries()] == [KEY, OTHER]
    monkeypatch.setenv("EDGE_CACHE_LIMIT", "25B")
    make(THIRD)
    assert {entry.key for entry in entries()} == {KEY, THIRD}
    assert not second.exists()
    monkeypatch.setenv("EDGE_CACHE_LIMIT", "5B")
    make(OTHER)
    assert [entry.key for entry in entries()] == [OTHER]  # the newest stays


def test_clear_removes_one_kind_or_all(folder: Path) -> None:
    make()
    with create("kernels", KEY, ".o") as temporary:
        temporary.write_bytes(b"abc")
    assert clear("kernels") == (1, 3)
    assert [entry.kind for entry in entries()] == ["weights"]
    unrecorded = folder / "weights" / f"{OTHER}.bin"
    unrecorded.write_bytes(b"12345")
    assert clear() == (1, 15)
    assert files(folder) == []
    assert clear() == (0, 0)


def test_unwritable_folder_names_the_remedy(folder: Path) -> None:
    folder.write_text("a file in the way", encoding="ascii")
    assert find("weights", KEY, ".bin") is None
    assert entries() == []
    for attempt in (create("weights", KEY, ".bin"), lock("weights", KEY)):
        with (
            pytest.raises(CacheError, match=r"cannot be written \(.+\): set EDGE_CACHE to a folder") as caught,
            attempt,
        ):
            pass
        assert "\n" not in str(caught.value)


def test_links_and_folders_in_the_way_are_named(folder: Path) -> None:
    make(OTHER)
    for name in (f"{KEY}.bin", f"{KEY}.bin.ok"):
        (folder / "weights" / name).mkdir()
        with pytest.raises(CacheError, match=f"{name} is a folder, where a file of the cache belongs: remove it"):
            make()
        (folder / "weights" / name).rmdir()
    (folder / "weights").rename(folder.with_name("outside"))
    (folder / "weights").symlink_to(folder.with_name("outside"))
    assert (find("weights", OTHER, ".bin"), entries(), clear()) == (None, [], (0, 0))
    with pytest.raises(CacheError, match="is a link"):
        make()


def test_read_only_folder_serves_its_entries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    path = make()
    os.utime(path, (1, 1))  # a copy: its record would be written anew
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert find("weights", KEY, ".bin") == path


def test_full_disk_names_the_remedy(folder: Path) -> None:
    with pytest.raises(CacheError, match=r"free \d+ GiB there, or set EDGE_CACHE"):  # noqa: SIM117
        with create("weights", KEY, ".bin", expected=1 << 60):
            pytest.fail("the work was begun")
    with pytest.raises(CacheError, match=r"free space there \(edge cache clear\)"), create("weights", KEY, ".bin"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert files(folder) == []


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
def test_with_lock_second_process_waits_and_finds(folder: Path) -> None:
    code = """
print("waits", flush=True)
with lock("weights", sys.argv[1]):
    path = find("weights", sys.argv[1], ".bin")
    if path is None:
        with create("weights", sys.argv[1], ".bin") as temporary:
            print("makes", flush=True)
            sys.stdin.readline()
            temporary.write_bytes(b"made")
print("found" if path else "made")
"""
    with start(code, KEY) as first:
        assert [first.stdout.readline() for _ in range(2)] == ["waits\n", "makes\n"]
        with start(code, KEY) as second:
            assert second.stdout.readline() == "waits\n"
            assert entries() == []
            assert first.communicate("go\n", timeout=240)[0] == "made\n"
            assert second.communicate("go\n", timeout=240)[0] == "found\n"
    assert files(folder) == [f"{KEY}.bin", f"{KEY}.bin.ok"]


@pytest.mark.skipif(sys.platform == "win32", reason="no flock")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EIO])
def test_network_folders_without_locks_are_used(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", fail)
    lockless = number == errno.ENOLCK
    with contextlib.nullcontext() if lockless else pytest.raises(CacheError), lock("weights", KEY):
        make()
    assert len(entries()) == lockless


def test_command_list_and_clear(folder: Path) -> None:
    path = make(about="SmolLM2\x1b[31m\n135M")
    (row,) = edge_json("cache", "list", "--json")["entries"]
    assert set(row) == {"kind", "key", "about", "bytes", "last_used", "path"}
    assert (row["kind"], row["bytes"], row["path"]) == ("weights", 10, str(path))
    done = run_edge("cache", "list")
    heading, _, line, summary = done.stdout.splitlines()
    assert [cell.strip() for cell in heading.split("|")[1:-1]] == ["kind", "about", "last used", "entries", "size"]
    for part in ("weights", "SmolLM2\ufffd[31m\ufffd135M", " 1 |", "10 B"):
        assert part in line
    assert summary == f"{folder}: 10 B of at most 16 GiB"
    assert edge_json("cache", "clear", "--kind", "kernels", "--json") == {"removed": 0, "bytes": 0}
    assert run_edge("cache", "clear").stdout == "removed 1 entry, 10 B\n"
    assert edge_json("cache", "clear", "--json") == {"removed": 0, "bytes": 0}


@pytest.mark.parametrize("stated", [None, "", "/absolute/here"])  # of relative ones, versions of platformdirs differ
@pytest.mark.parametrize("home", [None, "", "relative", "/home/somebody"])
def test_systems_folders_match_platformdirs(
    stated: str | None, home: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HOME": home, **dict.fromkeys(("XDG_CACHE_HOME", "XDG_DATA_HOME"), stated)}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert system_folder("cache") == platformdirs.user_cache_dir("edge")
    assert system_folder("data") == platformdirs.user_data_dir("edge")
    assert system_folder("config") == platformdirs.user_config_dir("edge")


# Locks between processes


@contextlib.contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until a line comes."""
    code = """
from pathlib import Path
from edge.storage.lock import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""
    with start(code, path) as child:
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.send_signal(signal.SIGCONT)
            child.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="files have no locks there")
@pytest.mark.parametrize(("limit", "stopped", "said"), [
    ("_STOPPED_S", True, "is stopped: let it go on"), ("_LONGEST_S", False, "has kept it"),
])  # fmt: skip
def test_holder_that_keeps_the_lock_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, stopped: bool, said: str
) -> None:
    monkeypatch.setattr(f"edge.storage.lock.{limit}", 0.2)
    with holder(tmp_path / "lock") as child:
        if stopped:
            child.send_signal(signal.SIGSTOP)
        with (
            pytest.raises(CacheError, match=rf"process {child.pid} holds this lock and {said}"),
            file_lock(tmp_path / "lock"),
        ):
            pass
        assert child.poll() is None


@pytest.mark.skipif(sys.platform == "win32", reason="files have no locks there")
@pytest.mark.parametrize("end", ["kill", "release"])
def test_lock_is_had_once_its_holder_is_gone(tmp_path: Path, end: str) -> None:
    with holder(tmp_path / "lock") as child:
        if end == "kill":
            child.kill()
        else:
            child.stdin.write("\n")
            child.stdin.flush()
        with file_lock(tmp_path / "lock"):
            assert (tmp_path / "lock").read_text() == str(os.getpid())
    assert not (tmp_path / "lock").exists()
