"""`make test-share`: exhaustive tests for some minutes, and with the next call those that are left.

What has passed counts for these sources only: build/shares has a file for each state of them, named after its hash.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LEFT = "left for the next share"
_END = "EDGE_SHARE_END"  # seconds since the epoch


class Share:
    """A plugin of pytest. minutes: after these, no test begins."""

    def __init__(self, minutes: float, is_worker: bool, root: Path = ROOT) -> None:
        self._writes, self._left = not is_worker, 0
        if not is_worker:
            os.environ[_END] = str(time.time() + 60 * minutes)  # which workers inherit
        self._record = root / "build" / "shares" / f"{_state(root)}.txt"
        self._done = set(self._record.read_text().splitlines()) if self._record.exists() else set()

    def is_done(self, item: pytest.Item) -> bool:
        return item.nodeid in self._done

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if time.time() > float(os.environ[_END]):
            pytest.skip(LEFT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        is_left = report.skipped and LEFT in str(report.longrepr)
        self._left += is_left
        if self._writes and not is_left and (report.skipped or (report.passed and report.when == "call")):
            self._record.parent.mkdir(parents=True, exist_ok=True)
            with self._record.open("a") as record:
                record.write(f"{report.nodeid}\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:  # all are done
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        more = f"{self._left} tests are left: make test-share goes on" if self._left else "no test is left"
        terminalreporter.write_line(f"{more} (of these sources, what has passed is in {self._record})")


def _state(root: Path) -> str:
    """A hash of all that git knows of."""
    asked = (("rev-parse", "HEAD^{tree}"), ("diff", "HEAD"))
    said = [subprocess.run(["git", *each], cwd=root, capture_output=True).stdout for each in asked]
    return hashlib.sha256(b"".join(said)).hexdigest()[:16]
