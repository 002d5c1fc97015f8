"""The processes that tests fork from, and what tests cost."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import cost
import fork_server
import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
def test_threads_that_begin_at_once_share_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the one that nobody keeps would end while it is asked."""

    def run(_: int) -> int:
        return subprocess.run(fork_server.forking("pass", "this"), capture_output=True).returncode

    monkeypatch.setattr(fork_server, "_SERVERS", {})
    with fork_server.fork_servers(monkeypatch), ThreadPoolExecutor(6) as pool:
        before = _lines()
        assert [*pool.map(run, range(6))] == [0] * 6
    ran = _lines()[len(before) :]
    assert [module for module, _ in ran] == ["this"] * 6
    assert all(float(seconds) > 0 for _, seconds in ran)


def _lines() -> list[list[str]]:
    return [line.split() for line in fork_server.FORKS.read_text().splitlines()] if fork_server.FORKS.exists() else []


def test_folders_above_their_allowance_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"tests/kv/test_a.py": [2.5, 0], "tests/kv/test_b.py": [3.0, 2], "tests/gpu/test_c.py": [9.0, 4]}
    folders = cost.by_folder(files)
    assert folders == {"kv": (5.5, 2), "gpu": (9.0, 4)}
    monkeypatch.setattr(cost, "allowed", lambda: ({"kv": 5, "gpu": 9}, 5))
    seconds, compilations = cost.above(folders)
    assert seconds.startswith("tests/kv took 6 s of CPU, its allowance is 5 s")
    assert compilations.startswith("6 compilations, 5 are allowed")
