"""What a whole run of the tests reached, against what it should reach: a wing that is skipped fails no test.

`make test` lists which files and parts did not run. In CI they fail, and so does each test that is skipped for a reason
that an installation could mend.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

# Parts of files, since their packages or programs may be missing: a pattern of the tests that show each.
PARTS = {
    "C on ARM, under QEMU": r"^tests/apps/test_platform\.py::test_the_same_runs_on_arm",
    "C under a sanitizer": r"^tests/apps/test_runtime_pass\.py::test_passes_run_under_sanitizers",
    "CUDA by NVRTC": r"^tests/gpu/test_gpu_shaders\.py::test_nvrtc_",
    "Gemma 3 270M": r"^tests/model/test_gemma\.py::",
    "kernels under oclgrind": r"^tests/gpu/test_gpu_shaders\.py::test_kernels_neither_race",
    "llama.cpp": r"^tests/backends/test_conformance\.py::.*\[llamacpp-",
    "the native engine": r"^tests/backends/test_conformance\.py::.*\[cpu-",
    "ONNX Runtime": r"^tests/backends/test_conformance\.py::.*\[onnx-",
    "OpenCL": r"^tests/backends/test_conformance\.py::.*\[gpu@opencl",
    "profiles over adb": r"^tests/lab/test_adb\.py::test_progress_comes",
    "profiles over ssh": r"^tests/lab/test_ssh\.py::test_a_machine_measures_itself",
    "QNN's emulator": r"^tests/backends/test_conformance\.py::.*\[onnx@qnn",
    "structured output": r"^tests/run/test_grammar\.py::",
    "SmolLM2 135M": r"^tests/native/test_streaming\.py::test_a_budget_below_the_weights",
    "Vulkan": r"^tests/backends/test_conformance\.py::.*\[gpu@wgpu",
    "Windows' own Python": r"^tests/native/test_windows_python\.py::test_logits",
    "WGSL by Dawn": r"^tests/gpu/test_gpu_shaders\.py::test_dawn_",
}
EXHAUSTIVE = ("test_runtime_arm.py", "test_runtime_sanitized.py")  # `make test` leaves all of their tests out
# What no package brings to Linux on x86-64: other rights, other devices, what an engine does not do.
NOT_FOR_EVERYONE = re.compile("|".join((
    "root may ", "only root ", "no IPv6", "this CPU runs none of ", "one CPU", "has GPU support", "the resident set",
    "llama.cpp cannot leave a gap", "no cgroup may be ",
)))  # fmt: skip
MUST = (
    os.environ.get("CI") == "true"
    and sys.platform == "linux"
    and platform.machine() == "x86_64"
    and sys.version_info >= (3, 11)  # earlier ones have no ONNX Runtime
)


class Wings:
    """A plugin of pytest. whole: all files run, so each of them and of PARTS should."""

    def __init__(self, whole: bool, must: bool = MUST) -> None:
        self._whole, self._must = whole, must
        self._passed, self._skipped = set[str](), dict[str, str]()  # ids; with the reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when == "call":
            self._passed.add(report.nodeid)
        self._keep_skip(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._keep_skip(report)

    def _keep_skip(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._skipped[report.nodeid] = str(report.longrepr[-1] if report.longrepr else "")  # type: ignore[index]

    def _complaints(self, root: Path) -> Iterator[str]:
        if self._whole:
            paths = sorted((root / "tests").rglob("test_*.py"))
            files = [path.relative_to(root).as_posix() for path in paths if path.name not in EXHAUSTIVE]
            yield from (f"did not run: {name}" for name in not_run(files, PARTS, self._passed))
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
            for line in complaints or [f"every file of tests ran, and {', '.join(PARTS)}"]:
                terminalreporter.write_line(line)


def not_run(files: Collection[str], parts: Mapping[str, str], passed: Collection[str]) -> list[str]:
    """Files and parts without a test that passed. passed: ids of tests."""
    ran = {name.partition("::")[0] for name in passed}
    missing = [name for name in files if name not in ran]
    return missing + [part for part, pattern in parts.items() if not any(re.search(pattern, name) for name in passed)]
