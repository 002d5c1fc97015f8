"""The processes that tests fork from."""

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
        assert [*pool.map(run, range(6))] == [0] * 6
