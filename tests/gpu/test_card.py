"""benchmarks/card.py: a step that is late takes neither the others nor its children with it."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("card")


def test_steps_end_in_time_with_their_children(card: Any, tmp_path: Path) -> None:
    orphan = tmp_path / "orphan"
    steps = [
        card.Step("late", ("sh", "-c", f"sleep 600 & echo $! >'{orphan}'; wait"), 4),
        card.Step("failed", (sys.executable, "-c", "print('so it is'); raise SystemExit(3)"), 60),
        card.Step("fine", (sys.executable, "-c", "print(1)"), 60, "json"),
    ]
    ended = list(card.run_steps(steps, tmp_path, 300))
    assert [(each.step, each.how) for each in ended] == [("late", "late"), ("failed", "failed"), ("fine", "ok")]
    assert ended[1].last == "so it is"
    assert (tmp_path / "fine.json").read_text() == "1\n"
    stat = Path(f"/proc/{int(orphan.read_text())}/stat")
    assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    skipped = list(card.run_steps(steps, tmp_path, 0))
    assert {each.how for each in skipped} == {"skipped"}


def test_every_step_is_a_command_of_this_tree(card: Any, tmp_path: Path) -> None:
    options = Namespace(
        adapter="cuda:0", model=["a", "b.gguf"], large=True, llama_bench=None, llama_source=tmp_path / "llama"
    )
    steps = card.plan(options, tmp_path)
    named = [each.name for each in steps]
    assert named == ["devices", "configure", "build", "a", "b", "conformance", "large", "tune", "tuned"]
    paths = [part for step in steps for part in step.command if part.startswith(("tests/", "benchmarks/"))]
    assert all(os.path.exists(card.ROOT / path) for path in paths)
