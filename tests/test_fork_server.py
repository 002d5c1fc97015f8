"""The processes that tests fork from, and what tests cost."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import fork_server
import pytest


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has them")
def test_threads_that_begin_at_once_share_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two, the one that nobody keeps would end while it is asked."""

    def run(_: int) -> int:
        return subprocess.run(fork_server.forking("pass", "this"), capture_output=True).returncode

    monkeypatch.setattr(fork_server, "_SERVERS", {})
    with fork_server.fork_servers(monkeypatch), ThreadPoolExecutor(6) as pool:
        before = _seconds()
        assert [*pool.map(run, range(6))] == [0] * 6
    ran = _seconds()[len(before) :]
    assert len(ran) == 6
    assert all(each > 0 for each in ran)


def _seconds() -> list[float]:
    """Of `this`: forks of earlier tests, whose clients were killed, may end meanwhile."""
    lines = fork_server.FORKS.read_text().splitlines() if fork_server.FORKS.exists() else []
    return [float(seconds) for module, seconds in map(str.split, lines) if module == "this"]
