"""What users asked for: whole or not there, with their umask, in folders that exist, and nothing left by the killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from conftest import GOLDEN
from typer.testing import CliRunner

from edge.cli.commands import app
from edge.converters.convert import Conversion, convert
from edge.devices import output
from edge.devices.output import held, new_file, new_folder, sweep, work_folder, write_whole
from edge.errors import InputError
from edge.storage import cache

MODEL = str(GOLDEN / "llama-one-layer.gguf")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no modes, no locks")


@pytest.fixture(autouse=True)
def system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files of the system go: what other tests leave behind is not ours to sweep."""
    folder = tmp_path / "system"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


@pytest.fixture(params=["exchange", "two steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which a folder is replaced."""
    if request.param == "two steps":
        monkeypatch.setattr(output, "_exchange", lambda one, other: False)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def fill(folder: Path, content: str) -> Path:
    with new_folder(folder) as made:
        (made / "file").write_text(content)
    return folder / "file"


def killed(code: str, *arguments: object) -> None:
    """Run code in a process that ends by SIGKILL in its last line."""
    head = "import os, sys\nfrom pathlib import Path\nfrom edge.devices.output import *\n"
    done = subprocess.run([sys.executable, "-c", head + code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


DIE = "os.kill(os.getpid(), 9)"


# Modes


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_umask_is_respected(place: Path, umask: int, file: int, folder: int) -> None:
    before = os.umask(umask)
    try:
        write_whole(place / "report.json", "{}")
        convert(MODEL, place / "m.gguf", Conversion("gguf"))
        made = fill(place / "folder", "x")
        with new_file(place / "private", private=True), work_folder() as work:
            assert work.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)
    modes = {name: (place / name).stat().st_mode & 0o777 for name in names(place)}
    assert modes == {"folder": folder, "m.gguf": file, "private": 0o600, "report.json": file}
    assert made.stat().st_mode & 0o777 == file


# Whole or not at all


def test_failed_writes_keep_the_old_file(place: Path) -> None:
    write_whole(place / "a", "before")
    fill(place / "b", "before")

    def fail() -> None:
        with new_file(place / "a"), new_folder(place / "b") as made, work_folder(place / "c"):
            (made / "file").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert (names(place), (place / "a").read_text()) == (["a", "b"], "before")
    assert (place / "b" / "file").read_text() == "before"


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("write", [new_file, new_folder, work_folder])
def test_interrupt_at_any_line_leaves_nothing(place: Path, write: Callable[[Path], Any]) -> None:
    """Ctrl-C or SIGTERM between two lines, from the first one to the last before the block."""

    def interrupted_at(line: int) -> bool:
        left = line

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal left
            if frame.f_code.co_filename != output.__file__:
                return None
            if event == "line":
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        before = sys.gettrace()
        try:
            sys.settrace(trace)
            with write(place / "out"):
                sys.settrace(None)
                return False
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)

    line = 1
    while interrupted_at(line):
        assert os.listdir(place) == []
        line += 1
    assert line > 20  # lines that were tried


@pytest.mark.usefixtures("way")
def test_folder_that_came_meanwhile_is_not_replaced(place: Path) -> None:
    def race() -> None:
        with new_folder(place / "folder") as made:
            (made / "file").write_text("late")
            fill(place / "folder", "first")

    with pytest.raises(InputError, match="folder cannot be written"):
        race()
    assert (place / "folder" / "file").read_text() == "first"
    assert names(place) == ["folder"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere folders are not exchanged")
def test_folder_that_is_replaced_is_always_there(place: Path) -> None:
    file, missing, done = fill(place / "folder", "0"), list[int](), threading.Event()

    def look() -> None:
        while not done.is_set():
            try:
                file.stat()
            except OSError:
                missing.append(1)

    watcher = threading.Thread(target=look)
    watcher.start()
    for number in range(50):
        fill(place / "folder", str(number))
    done.set()
    watcher.join()
    assert not missing


def test_crash_between_two_steps_is_repaired(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place / "folder", "old")
    killed(
        "import edge.devices.output as o\no._exchange = lambda *_: False\nrename = o.os.rename\n"
        "def once(*names):\n    rename(*names)\n    " + DIE + "\no.os.rename = once\n"
        "with new_folder(Path(sys.argv[1])) as made: (made / 'file').write_text('new')",
        place / "folder",
    )
    assert "folder" not in names(place)
    write_whole(place / "other", "")
    assert names(place) == ["folder", "other"]
    assert (place / "folder" / "file").read_text() == "old"


def test_step_that_fails_is_taken_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(place / "folder", "old")
    monkeypatch.setattr(output, "_exchange", lambda one, other: False)
    rename = os.rename

    def refuse(one: Path, other: Path) -> None:
        if output._TEMPORARY in one.name:
            raise OSError(5, "Input/output error")
        rename(one, other)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(InputError, match=r"folder cannot be written \(Input/output error\)"):
        fill(place / "folder", "new")
    assert (names(place), (place / "folder" / "file").read_text()) == (["folder"], "old")


# What the killed leave


@pytest.mark.parametrize("code", [
    "with new_file(Path(sys.argv[1])) as made: made.write_bytes(bytes(1000)); " + DIE,
    "with new_folder(Path(sys.argv[1])) as made: (made / 'x').write_bytes(bytes(1000)); " + DIE,
    "with work_folder(Path(sys.argv[1])) as made: (made / 'x').write_bytes(bytes(1000)); " + DIE,
])  # fmt: skip
def test_next_who_writes_there_sweeps(place: Path, code: str) -> None:
    (place / ".edge-tmp-notes").touch()  # not made by us
    killed(code, place / "target")
    with new_file(place / "mine") as mine, work_folder(place / "mine too") as work:
        assert names(place) == sorted([".edge-tmp-notes", mine.name, work.name])
        assert sweep(place) == 0  # they are in use
        assert mine.exists()
        assert work.exists()
    assert names(place) == [".edge-tmp-notes", "mine"]


def test_cache_clear_sweeps_systems_folder_and_its_own(system_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_CACHE", str(system_folder.parent / "cache"))
    killed(
        "import tempfile; tempfile.tempdir = sys.argv[1]\nfrom edge.storage.cache import create\n"
        "with work_folder() as made, create('weights', '0' * 32, '.bin') as entry:\n"
        "    (made / 'x').write_bytes(bytes(1000)); entry.write_bytes(bytes(500)); " + DIE,
        system_folder,
    )
    assert len(names(system_folder)) == 1
    assert cache.clear() == (0, 1500)
    assert names(system_folder) == []
    assert names(system_folder.parent / "cache" / "weights") == []


def test_held_files_are_not_swept(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a process in another container does. One holds a file at a time."""
    monkeypatch.setenv("EDGE_CACHE", str(place))
    monkeypatch.setattr("psutil.pid_exists", lambda pid: False)
    with cache.create("weights", "0" * 32, ".bin") as entry:
        assert cache.clear() == (0, 0)
        assert entry.exists()
    (place / "a").touch()
    with held(place / "a") as first, held(place / "a") as second:
        assert (first, second) == (True, False)


# Folders that are not there


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail: work was done before the place of its result was checked."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the work was begun")

    for name in (
        "edge.converters.convert._read",
        "edge.lab.profiling.ceilings.probe_profile",
        "edge.converters.gguf.plain.write_plain",
    ):
        monkeypatch.setattr(name, refuse)
    return


@pytest.mark.usefixtures("reads_nothing")
@pytest.mark.parametrize("line", [
    "convert MODEL NOWHERE.gguf", "convert MODEL NOWHERE --to onnx", "convert MODEL NOWHERE --to hf",
    "quantize MODEL NOWHERE.gguf q8_0", "compile MODEL --device host -o NOWHERE",
    "eval perplexity MODEL --text TEXT --context 16 -o NOWHERE.json",
    "eval kl MODEL --reference MODEL --text TEXT -o NOWHERE.json", "eval kv MODEL --text TEXT -o NOWHERE.json",
    "profile MODEL -o NOWHERE.json", "devices probe -o NOWHERE.toml",
])  # fmt: skip
def test_every_command_refuses_folder_that_is_not_there(tmp_path: Path, line: str) -> None:
    nowhere, text = tmp_path / "nowhere" / "x", tmp_path / "text"
    text.write_text("word " * 200)
    places = {"MODEL": MODEL, "TEXT": str(text)}
    arguments = [places.get(word, word.replace("NOWHERE", str(nowhere))) for word in line.split()]
    done = CliRunner().invoke(app, arguments)
    assert isinstance(done.exception, InputError), done.output
    expected = rf"nowhere/x\S* cannot be written: {nowhere.parent} is not there: make that folder first"
    with pytest.raises(InputError, match=expected):
        raise done.exception
    assert not nowhere.parent.exists()


@pytest.mark.parametrize("write", [lambda path: write_whole(path, ""), lambda path: fill(path, "")])
def test_file_for_folder_is_refused(place: Path, write: Callable[[Path], object]) -> None:
    (place / "file").touch()
    with pytest.raises(InputError, match="file is no folder"):
        write(place / "file" / "x")
    assert names(place) == ["file"]
