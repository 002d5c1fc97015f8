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
        before = _lines()
        assert [*pool.map(run, range(6))] == [0] * 6
    ran = _lines()[len(before) :]
    assert [module for module, _ in ran] == ["this"] * 6
    assert all(float(seconds) > 0 for _, seconds in ran)


def _lines() -> list[list[str]]:
    return [line.split() for line in fork_server.FORKS.read_text().splitlines()] if fork_server.FORKS.exists() else []
