"""A few of the random runs of benchmarks/limits.py: each in a process that cannot have more than its budget."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import on_gpu
from test_child import wait_for

RUNS, MOST_SECONDS = 4, 2


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    if sys.platform != "linux":
        pytest.skip("RLIMIT_DATA bounds what is private on Linux only")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # each has memory, which runs touch and plans do not
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("limits")


@pytest.mark.slow
def test_budgets_are_kept_or_refused(limits: Any) -> None:
    chance = random.Random(4)
    engines = [engine for engine in limits.DTYPES if engine != "gpu" and limits.available(engine)]
    cases = [limits.random_case(chance, engines, limits.MODELS[1:2]) for _ in range(RUNS)]
    cases = [replace(case, seconds=case.seconds and min(case.seconds, MOST_SECONDS)) for case in cases]
    limits.warm_up(cases)
    with ExitStack() as stack:
        groups = [stack.enter_context(limits.cgroup(0))]  # None where none can be made
        outcomes = [limits.run_in(groups, case) for case in cases]
    kinds = {each.kind for each in outcomes}
    assert kinds <= set(limits.KEPT), [(each.kind, each.said) for each in outcomes]
    assert "refused" in kinds
    assert kinds & {"ok", "cut"}  # a slow machine's --time cuts what a fast one's does not
    assert all(each.peak <= each.case.budget for each in outcomes if each.kind != "refused")


@pytest.mark.slow
def test_twenty_pictures_of_fifty_million_pixels(limits: Any, tmp_path: Path) -> None:
    """As raw pixels, each would take 150 MB."""
    picture = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    picture.new("RGB", (8000, 6250), "teal").save(tmp_path / "a.jpg")
    data, files = (tmp_path / "a.jpg").read_bytes(), [tmp_path / f"{number}.jpg" for number in range(20)]
    for number, file in enumerate(files):
        file.write_bytes(data + bytes([number]))  # behind its end: another picture for caches
    case = limits.Case(
        str(limits.GOLDEN / "eyes" / "smolvlm.gguf"), "reference", "streaming", "f32", 100 * limits.MIB, 10, 4,
        None, None, pictures=tuple(map(str, files)),
    )  # fmt: skip
    with limits.cgroup(0) as group:
        outcome = limits.run_in([group], case)
        assert (outcome.kind, outcome.peak <= case.budget, "20 pictures" in outcome.said) == ("ok", True, True), outcome
        tight = limits.run_in([group], replace(case, budget=70 * limits.MIB))
        assert tight.kind == "refused", tight


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("adapter", ["wgpu:0", pytest.param("opencl:0", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("uncompiled", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_budgets_hold_while_drivers_compile(limits: Any, adapter: str, uncompiled: bool) -> None:
    """Nearly met budgets, of what `edge plan` names for runs in which the driver has compiled nothing, or all.

    One process plans and another runs, which may differ by a few MiB.
    """
    if adapter not in limits.software_adapters():
        pytest.skip(f"no software adapter {adapter}")
    with on_gpu(adapter):
        case = limits.Case(
            str(limits.MODELS[1]), "gpu", "streaming", "f16", 0, 100, 8, 64, 24, near=True, adapter=adapter,
            uncompiled=uncompiled,
        )  # fmt: skip
        limits.warm_up([case])
        case = limits.plan_near(case, 1.05)
        outcome = limits.run(case, None)
        assert outcome.kind == "ok", outcome.said
        assert 0.5 * case.budget < outcome.peak <= case.budget
        refused = limits.run(replace(case, budget=int(0.9 * case.budget)), None)
        assert refused.kind == "refused", refused.said


def test_first_runs_and_budgets_that_are_nearly_met(limits: Any) -> None:
    """One draw of each, on an engine that compiles nothing, and a child that counts beside its parent."""
    chance, tiny = random.Random(3), limits.MODELS[1:2]
    first = limits.first_case(chance, ["reference"], tiny)
    assert (first.first, first.prompt <= 500) == (True, True)
    near = limits.plan_near(limits.near_case(chance, ["reference"]), 1.02)
    for case in (first, near):
        outcome = limits.run(case, None)
        assert outcome.kind in limits.KEPT, outcome.said
        assert outcome.kind == "refused" or 0.3 * case.budget < outcome.peak <= case.budget


@pytest.mark.usefixtures("limits")
def test_children_count_beside_their_parent() -> None:
    """A launcher's child of about 10 MiB, whose own child holds 60 MiB more."""
    from processes import Together

    holds = "import sys; held = b'1' * (60 << 20); print(1, flush=True); sys.stdin.read()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process, Together(process.pid) as together:  # fmt: skip
        process.stdout.readline()
        wait_for(lambda: together.peak > 68 << 20)
        process.stdin.close()
    assert together.peak < 110 << 20


@pytest.mark.usefixtures("limits")
def test_forked_child_with_parents_memory_is_not_counted() -> None:
    """As between vfork and exec, where a busy machine may leave a child: here it waits there."""
    from processes import Together

    holds = """
import ctypes, os, sys
held, libc, stack = b"1" * (60 << 20), ctypes.CDLL(None), ctypes.create_string_buffer(1 << 16)
top = ctypes.c_void_p((ctypes.addressof(stack) + len(stack)) & ~15)
child = libc.clone(libc.pause, top, 0x100 | 17, None)  # CLONE_VM | SIGCHLD
print(1, flush=True)
sys.stdin.read()
os.kill(child, 9)
"""
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", launcher], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:  # fmt: skip
        process.stdout.readline()
        with Together(process.pid) as together:
            wait_for(lambda: together.peak > 60 << 20)
        process.stdin.close()
    assert together.peak < 110 << 20


def test_run_that_takes_too_long_leaves_nothing(limits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left would hold memory of the next run's cgroup."""
    monkeypatch.setattr("limited._TIMEOUT_S", 1)
    budget = (600 << 20) + os.getpid()  # a number by which to know the run
    case = limits.Case(str(limits.MODELS[1]), "reference", "streaming", "f32", budget, 1 << 20, 2, 512, None)
    assert limits.run(case, None).kind == "took too long"
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ends meanwhile
            assert str(budget) not in path.read_text(errors="replace")
