"""What tests cost: CPU seconds and compilations of each, summed by folder and file, against each folder's allowance.

    python tests/cost.py [--files N]     # of the last whole run, which left its figures in build/cost.json

Which folder a compilation counts for depends on which test needs the design first, so all of them have one allowance;
a whole run that compiles more fails. CPU time is that of a worker and of the children it has waited for; what forks of
`fork_server` spend, whose parent is the server, comes from the lines that they append to `FORKS`. A module's fixtures
count for the tests that set them up and tear them down.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fork_server import COMPILERS, FORKS

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "build" / "cost.json"
# CPU seconds by folder, with a cold cache: 1.1 × those of two shared cores of a server, which are 1.4 × those of a new
# desktop; and 1.1 × the compilations of a whole run.
ALLOWED = Path(__file__).with_name("allowances.json")
_KEY = "cost"


class Cost:
    """A plugin of pytest: measures in each worker, adds up where the run is controlled."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._seconds, self._compilations = Counter[str](), Counter[str]()  # by file

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """The measured properties travel with the report of the teardown, which xdist sends."""
        item.stash[_BEFORE] = _spent()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        if call.when == "teardown":
            seconds, compilations = (now - then for now, then in zip(_spent(), item.stash[_BEFORE], strict=True))
            report.user_properties.append((_KEY, [seconds, compilations]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            file = report.nodeid.partition("::")[0]
            for key, value in report.user_properties:
                if key == _KEY:
                    self._seconds[file] += value[0]
                    self._compilations[file] += int(value[1])

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self._whole:
            return
        files = {each: [round(self._seconds[each], 2), self._compilations[each]] for each in sorted(self._seconds)}
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(files, indent=1) + "\n")
        for line in above(by_folder(files)):
            terminalreporter.write_line(line)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._whole and session.exitstatus == 0 and self._compilations.total() > allowed()[1]:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


_BEFORE = pytest.StashKey[tuple[float, int]]()
_FORKS = [0, 0.0, 0]  # what has been read of FORKS: bytes, CPU seconds and compilations


def _spent() -> tuple[float, int]:
    """CPU seconds and compilations so far, of this process, its children that have ended, and forks."""
    if FORKS.exists():
        with FORKS.open("rb") as file:
            file.seek(_FORKS[0])
            for line in file:
                module, seconds = line.decode().split()
                _FORKS[:] = _FORKS[0] + len(line), _FORKS[1] + float(seconds), _FORKS[2] + (module in COMPILERS)
    times = os.times()
    own = times.user + times.system + times.children_user + times.children_system
    return own + _FORKS[1], int(_FORKS[2])


def by_folder(files: dict[str, list[float]]) -> dict[str, tuple[float, int]]:
    folders: dict[str, tuple[float, int]] = {}
    for file, (seconds, compilations) in files.items():
        folder = (parts := Path(file).parts)[1 if len(parts) > 2 else 0]  # tests/apps/text/… counts for apps
        known = folders.get(folder, (0.0, 0))
        folders[folder] = (known[0] + seconds, known[1] + int(compilations))
    return folders


def allowed() -> tuple[dict[str, int], int]:
    """CPU seconds by folder, and compilations in all."""
    read = json.loads(ALLOWED.read_text())
    return read["seconds"], read["compilations"]


def above(folders: dict[str, tuple[float, int]]) -> list[str]:
    """One line for each folder whose tests cost more than it is allowed, and one for compilations."""
    limits, most = allowed()
    lines = [
        f"tests/{each} took {seconds:.0f} s of CPU, its allowance is {limits.get(each, 0)} s: make tests cheaper, or "
        f"say in tests/{ALLOWED.name} why it needs more"
        for each, (seconds, _) in sorted(folders.items())
        if seconds > limits.get(each, 0)
    ]
    if (count := sum(each for _, each in folders.values())) > most:
        lines.append(
            f"{count} compilations, {most} are allowed: give a test's model the shape of one that is compiled already"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds and compilations of the last whole run of the tests.")
    parser.add_argument("--files", type=int, default=15, metavar="N", help="also the N most costly files")
    chosen = parser.parse_args()
    if not RECORD.exists():
        sys.exit(f"no {RECORD.relative_to(ROOT)}: run make test first")
    files = json.loads(RECORD.read_text())
    folders, (limits, most) = by_folder(files), allowed()
    total = sum(seconds for seconds, _ in folders.values()), sum(count for _, count in folders.values())
    print("CPU seconds  allowed  compilations")
    for name, (seconds, count) in [*sorted(folders.items(), key=lambda each: -each[1][0]), ("in all", total)]:
        limit = sum(limits.values()) if name == "in all" else limits.get(name, 0)
        print(f"{seconds:11.1f} {limit:8} {count:13}  {name}")
    print(f"{'':20} {most:13}  compilations allowed\n")
    for name, (seconds, count) in sorted(files.items(), key=lambda each: -each[1][0])[: chosen.files]:
        print(f"{seconds:11.1f} {'':8} {count:13}  {name}")
    for line in above(folders):
        print(line)


if __name__ == "__main__":
    main()
