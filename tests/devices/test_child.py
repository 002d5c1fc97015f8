"""Children that talk JSON: they answer, fail in one line, and never outlive us."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from edge.devices.child import room_for_children, run_child
from edge.devices.memory import memory_use
from edge.errors import BudgetError, EngineError, InputError

Ask = Callable[..., Any]


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Runs this body of work(request, say) in a child."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(body: str, request: object = None, hear: Callable[[Any], None] = lambda said: None, **more: Any) -> Any:
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        head = "import os, subprocess, sys\nfrom edge import errors\nfrom edge.devices.child import serve\n"
        (tmp_path / "a_child.py").write_text(f"{head}def work(request, say):\n{lines}serve(work)\n")
        return run_child("a_child", request, hear, failure="no luck", **more)

    return run


def test_messages_pass_both_ways(ask: Ask) -> None:
    said: list[Any] = []
    body = "print('noise')\nos.system('echo noise')\nsay({'half': request['é'] / 2})\nreturn [request, os.environ['X']]"
    assert ask(body, {"é": 3}, said.append, environment={"X": "y"}) == [{"é": 3}, "y"]
    assert said == [{"half": 1.5}]


@pytest.mark.parametrize(("body", "kind", "words"), [
    ("raise errors.InputError('not so')", InputError, "^not so$"),
    ("raise errors.BudgetError('too small', 7)", BudgetError, "^too small$"),
    ("raise ValueError('what?')", EngineError, r"no luck: it ended with status 1: ValueError: what"),
    ("os._exit(5)", EngineError, r"no luck: it ended with status 5: no reason given"),
    ("os.abort()", EngineError, "no luck: it ended with status -6"),
    ("print('x' * 9000, file=sys.stderr)\nos._exit(1)", EngineError, r"status 1: x{200}$"),
    ("print('{\"resu', end='', file=say.__closure__[0].cell_contents)\nsys.exit(4)", EngineError, "status 4"),
])  # fmt: skip
def test_failures_are_errors_of_edge(ask: Ask, body: str, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        ask(body)


def test_all_that_it_started_ends_with_it(ask: Ask) -> None:
    started: list[int] = []

    def interrupt(said: Any) -> None:
        started.extend(said["pids"])
        raise KeyboardInterrupt

    body = "other = subprocess.Popen(['sleep', '600'])\nsay({'pids': [os.getpid(), other.pid]})\nother.wait()"
    with pytest.raises(KeyboardInterrupt):
        ask(body, None, interrupt)
    assert len(started) == 2
    wait_for(lambda: not any(alive(pid) for pid in started))


BUSY = "ctypes.PyDLL(None).sleep(600)"  # holds Python's lock, as compilers in C++ do


@pytest.mark.parametrize("work", [
    "time.sleep(600)", pytest.param(BUSY, marks=pytest.mark.skipif(sys.platform != "linux", reason="Linux ends it")),
])  # fmt: skip
def test_it_ends_when_its_parent_is_gone(tmp_path: Path, work: str) -> None:
    (tmp_path / "a_child.py").write_text(
        "import ctypes, os, time\nfrom edge.devices.child import serve\n"
        f"serve(lambda request, say: (say({{'pid': os.getpid()}}), {work}))\n"
    )
    (tmp_path / "a_parent.py").write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nfrom edge.devices.child import run_child\n"
        "run_child('a_child', 1, lambda said: print(said['pid'], flush=True), failure='')\n"
    )
    command = [sys.executable, str(tmp_path / "a_parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    wait_for(lambda: not alive(pid))


def test_child_imports_no_modules_from_its_folder(ask: Ask, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    (folder / "edge").mkdir(parents=True)
    for name in ("edge/__init__.py", "runpy.py", "ctypes.py", "json.py", "colorsys.py"):
        (folder / name).write_text("raise SystemExit(9)")
    assert Path(ask("import colorsys, json\nreturn os.getcwd()", folder=folder)) == folder


def test_child_is_killed_at_its_timeout(ask: Ask) -> None:
    pids: list[int] = []
    with pytest.raises(EngineError, match=r"^no luck: it took more than 0.2 s$"):
        ask(
            "import time\nsay({'pid': os.getpid()})\ntime.sleep(600)",
            hear=lambda said: pids.append(said["pid"]),
            timeout=0.2,
        )
    assert not any(alive(pid) for pid in pids)


def alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != "zombie"
    return False


def wait_for(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120  # seconds, of a loaded machine
    while not happened():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def test_child_counts_beside_its_parent(ask: Ask) -> None:
    own = memory_use().rss
    with room_for_children(own + (300 << 20)) as outer, room_for_children(None) as room:
        ask("held = b'1' * (200 << 20)", takes=1 << 40)  # no budget
    assert own + (200 << 20) < room.most < own + (400 << 20)
    assert outer.most == room.most


def test_child_that_does_not_fit_is_not_started(ask: Ask, tmp_path: Path) -> None:
    started = tmp_path / "started"
    body = f"open({str(started)!r}, 'w')"
    own = memory_use().rss
    with room_for_children(own + (100 << 20)):
        with pytest.raises(BudgetError, match=r"a first run tries it in a process of its own") as caught:
            ask(body, takes=150 << 20, purpose="tries it")
        assert not started.exists()
    with room_for_children(caught.value.smallest + (16 << 20)):
        ask(body, takes=150 << 20, purpose="tries it")
    assert started.exists()
