"""A lock between processes: waited for, released by death, and not waited for in vain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edge.errors import CacheError
from edge.storage import lock as locks
from edge.storage.lock import file_lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="files have no locks there")

_HOLD = """
import sys
from pathlib import Path
from edge.storage.lock import file_lock
with file_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until a line comes."""
    command = [sys.executable, "-c", _HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "held\n"
        try:
            yield child
        finally:
            child.send_signal(signal.SIGCONT)
            child.kill()


@pytest.mark.parametrize(("limit", "stopped", "said"), [
    ("_STOPPED_S", True, "is stopped: let it go on"), ("_LONGEST_S", False, "has kept it"),
])  # fmt: skip
def test_holder_that_keeps_the_lock_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, stopped: bool, said: str
) -> None:
    monkeypatch.setattr(locks, limit, 0.2)
    with holder(tmp_path / "lock") as child:
        if stopped:
            child.send_signal(signal.SIGSTOP)
        with (
            pytest.raises(CacheError, match=rf"process {child.pid} holds this lock and {said}"),
            file_lock(tmp_path / "lock"),
        ):
            pass
        assert child.poll() is None


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
