"""A few of the random runs of benchmarks/limits.py: each in a process that cannot have more than its budget."""

from __future__ import annotations

import importlib
import random
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

RUNS, MOST_SECONDS = 4, 2


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Any:
    if sys.platform != "linux":
        pytest.skip("RLIMIT_DATA bounds what is private on Linux only")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # each has memory, which runs touch and plans do not
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("limits")


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


def test_first_runs_and_budgets_that_are_nearly_met(limits: Any) -> None:
    """One first run and one nearly met budget, on an engine that compiles nothing."""
    chance, tiny = random.Random(3), limits.MODELS[1:2]
    first = limits.first_case(chance, ["reference"], tiny)
    assert (first.first, first.prompt <= 500) == (True, True)
    near = limits.plan_near(limits.near_case(chance, ["reference"]), 1.02)
    for case in (first, near):
        outcome = limits.run(case, None)
        assert outcome.kind in limits.KEPT, outcome.said
        assert outcome.kind == "refused" or 0.3 * case.budget < outcome.peak <= case.budget
