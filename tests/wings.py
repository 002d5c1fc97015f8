"""What a whole run of the tests reached, against what it should reach: a wing that is skipped fails no test.

`make test` lists which files and parts did not run. In CI they fail, and so does each test that is skipped for a reason
that an installation could mend.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# What may be missing beside packages of whole files; tests that show it are marked `wing`, with its name.
WINGS = (
    "C on ARM, under QEMU", "C under a sanitizer", "CUDA by NVRTC", "Gemma 3 270M", "MiniLM", "kernels under oclgrind",
    "llama.cpp", "the native engine", "ONNX Runtime", "OpenCL", "profiles over adb", "profiles over ssh",
    "QNN's emulator", "structured output", "SmolLM2 135M", "Vulkan", "Windows' own Python", "WGSL by Dawn",
)  # fmt: skip
_ALL_EXHAUSTIVE = "\npytestmark = pytest.mark.exhaustive\n"  # of a file that `make test` leaves out
# What no package brings to Linux on x86-64: other rights, other devices, what an engine does not do.
NOT_FOR_EVERYONE = re.compile("|".join((
    "root may ", "only root ", "no IPv6", "this CPU runs none of ", "one CPU", "has GPU support", "the resident set",
    "llama.cpp cannot leave a gap", "no cgroup may be ", "it takes tokens only", "left for the next share",
    "no swift on the path", "no Maven", "built without libmtmd",
)))  # fmt: skip
MUST = (
    os.environ.get("CI") == "true"
    and sys.platform == "linux"
    and platform.machine() == "x86_64"
    and sys.version_info >= (3, 11)  # earlier ones have no ONNX Runtime
)


def mark_wings(items: Iterable[pytest.Item]) -> None:
    """Reports of these tests, which workers send, name the wings that they show."""
    for item in items:
        for mark in item.iter_markers("wing"):
            if mark.args[0] not in WINGS:
                raise pytest.UsageError(f"{item.nodeid}: {mark.args[0]!r} is not among WINGS")
            item.user_properties.append(("wing", mark.args[0]))


class Wings:
    """A plugin of pytest. whole: all files run, so each of them and of WINGS should."""

    def __init__(self, whole: bool, must: bool = MUST) -> None:
        self._whole, self._must = whole, must
        self._ran, self._skipped = set[str](), dict[str, str]()  # files and wings; ids, with the reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when == "call":
            self._ran.add(report.nodeid.partition("::")[0])
            self._ran.update(value for key, value in report.user_properties if key == "wing")
        self._keep_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep_skip(report)

    def _keep_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[report.nodeid] = str(report.longrepr[-1] if report.longrepr else "")  # type: ignore[index]

    def _complaints(self, root: Path) -> Iterator[str]:
        if self._whole:
            paths = sorted((root / "tests").rglob("test_*.py"))
            files = [path.relative_to(root).as_posix() for path in paths if _ALL_EXHAUSTIVE not in path.read_text()]
            yield from (f"did not run: {name}" for name in (*files, *WINGS) if name not in self._ran)
        if self._must:
            yield from (
                f"skipped, but not for good: {name}: {reason}"
                for name, reason in self._skipped.items()
                if not NOT_FOR_EVERYONE.search(reason)
            )

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._must and session.exitstatus == 0 and any(self._complaints(session.config.rootpath)):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        complaints = list(self._complaints(terminalreporter.config.rootpath))
        if self._whole or complaints:
            terminalreporter.section("wings")
            for line in complaints or [f"every file of tests ran, and {', '.join(WINGS)}"]:
                terminalreporter.write_line(line)
