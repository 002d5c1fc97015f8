"""`edge search`: the front, what is measured and what is remembered, its errors, and trials on a Dask cluster."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from html import escape
from pathlib import Path

import pytest
from conftest import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from test_cli import edge, edge_here, json_here

from edge.backends import engine_named
from edge.cli.making.quantize import quantize as command
from edge.converters.calibrate import TOKENS
from edge.converters.gguf.ggml import quantize_file
from edge.devices.memory import memory_use
from edge.devices.profiles import find_profile
from edge.errors import BudgetError, EdgeError, InputError
from edge.lab.report.page import render
from edge.lab.report.search import search_json, search_report
from edge.lab.searching import search as searching
from edge.lab.searching import trials
from edge.lab.searching.command import command_of
from edge.lab.searching.front import box_of, front
from edge.lab.searching.search import search
from edge.lab.searching.space import Space, plan_all, weights_of
from edge.lab.searching.trials import Outcome, Quality, Trial, answer, open_weights, run_trial
from edge.model.model import open_model
from edge.options import Options
from edge.plan.kv_losses import find_losses
from edge.values import parse

TINY = GOLDEN / "llama-gqa-tied.gguf"
# Only where no interpreter counts, as on phones, the bytes of so small a model matter.
SMALL = {"device": "raspberry-pi-5", "backend": "reference", "types": ["q8_0", "q4_0"], "policies": ["streaming"],
         "tokens": 96}  # fmt: skip

FEW = 256  # tokens to calibrate on

COSTS = st.lists(st.lists(st.floats(1e-3, 1e3), min_size=3, max_size=3), max_size=40)


@given(COSTS)
def test_front_is_undominated_and_complete(points: list[list[float]]) -> None:
    kept = front(points, lambda each: each)
    boxes = [box_of(each) for each in kept]
    for each in map(box_of, points):
        assert any(all(a <= b for a, b in zip(box, each, strict=True)) for box in boxes)
        assert not any(each != box and all(a <= b for a, b in zip(each, box, strict=True)) for box in boxes)
    assert len(set(boxes)) == len(boxes)


def test_figures_within_five_percent_share_a_box() -> None:
    assert [box_of([each]) for each in (1.0, 1.04, 1.06, 1.11)] == [(0,), (0,), (1,), (2,)]


class Here:
    """Runs trials in this process, and counts them. most: of them; then comes a Ctrl-C."""

    def __init__(self, most: int = 1000) -> None:
        self.ran: list[Trial] = []
        self._most = most

    def __call__(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in trials:
            if len(self.ran) == self._most:
                raise KeyboardInterrupt
            self.ran.append(trial)
            try:
                found = answer({"trial": json.loads(json.dumps(asdict(trial))), "memory": None})
                yield trial, parse(Outcome, found)
            except EdgeError as error:
                yield trial, Outcome(reason=str(error))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    """With a cache folder of its own: nothing is remembered. Importance matrices are of few tokens. All searches of a
    test count in a process of the same size: in one that has grown, other candidates may share a box of the front."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(trials, "TOKENS", FEW)
    size = memory_use()
    monkeypatch.setattr("edge.plan.plan.memory_use", lambda: size)
    return use(Here(), monkeypatch)


def use(runner: Here, monkeypatch: pytest.MonkeyPatch) -> Here:
    monkeypatch.setattr(searching, "cluster_of", lambda scheduler: nullcontext(runner))
    monkeypatch.setattr(searching, "run_here", runner)
    return runner


def test_front_holds_and_reports_name_commands(here: Here) -> None:
    found = search(TINY, **SMALL)
    measured = {(each.weights.type, each.cell) for each in here.ran if each.what == "quality"}
    figures = []
    for point in found.points:
        each = point.candidate
        assert (each.weights.type, each.cell) in measured
        assert "estimated" in each.tok_s.source
        figures.append((point.quality.kl, each.memory, -each.tok_s.value, each.joules.value))
    for one in figures:
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in figures)
    first = found.points[0]
    assert (first.candidate.weights.type, first.quality.kl) == (None, 0.0)
    assert len(found.points) < found.fitting
    page, text, data = (render(kind, search_report(found), search_json(found)) for kind in (".html", ".md", ".json"))
    assert [each["command"] for each in json.loads(data)["points"]] == [each.command for each in found.points]
    assert page.count('class="mark"') == 3 * len(found.points)
    assert all(f"`{point.command}`" in text for point in found.points)
    assert all(f"<code>{escape(point.command)}</code>" in page.partition("Command lines")[2] for point in found.points)


def test_kv_dtype_losses_serve_plans(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outcomes are given: what counts is which of them belong to a dtype alone."""
    losses = {"f16": 0.0, "int8": 0.02, "int4": 0.3}

    def run(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for each in trials:
            alone = (each.weights.type, each.cell.policy) == (None, "full")
            kl = losses[each.cell.kv_dtype or ""] if alone else 1.0
            yield each, Outcome(Quality(kl, 0.001, 1.0, 1.0, 0.0, 700))

    monkeypatch.setattr(searching, "cluster_of", lambda scheduler: nullcontext(run))
    search(TINY, **SMALL | {"backend": "cpu"})
    model, auto = open_model(TINY), Options(kv_policy="auto")
    found = find_losses(model.file, engine_named("cpu"), auto)
    assert {dtype: each.kl for dtype, each in found.items()} == {"int8": 0.02, "int4": 0.3}


def test_resumed_search_repeats_no_measurement(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted = use(Here(most=3), monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        search(TINY, **SMALL)
    rest = use(Here(), monkeypatch)
    resumed = search(TINY, **SMALL)
    assert resumed.remembered == len(interrupted.ran) == 3
    assert resumed.measured == len(rest.ran) > 0
    assert not {each.key() for each in interrupted.ran} & {each.key() for each in rest.ran}
    again = use(Here(), monkeypatch)
    points = search(TINY, **SMALL).points
    assert [(each.command, each.quality) for each in points] == [
        (each.command, each.quality) for each in resumed.points
    ]
    assert again.ran == []
    assert search(TINY, **{**SMALL, "tokens": 112}).measured > 0  # another text is another measurement


def test_failed_trials_are_named_and_not_remembered(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trials: Sequence[Trial]) -> Iterator[tuple[Trial, Outcome]]:
        for trial in trials:
            yield (trial, Outcome(reason="the disk burns")) if trial.weights.type else next(here([trial]))

    monkeypatch.setattr(searching, "cluster_of", lambda scheduler: nullcontext(broken))
    found = search(TINY, **SMALL)
    assert {reason for _, reason in found.failed} == {"the disk burns"}
    assert {point.candidate.weights.type for point in found.points} == {None}
    use(here, monkeypatch)
    assert search(TINY, **SMALL).failed == ()


def test_size_of_family_is_measured_against_largest(here: Here, tmp_path: Path) -> None:
    small = tmp_path / "small.gguf"
    quantize_file(open_model(TINY).file, small, "Q8_0")
    found = search([small, TINY], **{**SMALL, "types": []})
    assert {each.reference.path for each in here.ran} == {str(TINY)}
    assert {each.weights.path for each in here.ran} == {str(TINY), str(small)}
    assert found.points[0].candidate.weights.model == str(TINY)
    assert found.points[0].quality.kl == 0
    with pytest.raises(InputError, match="different vocabularies"):
        search([TINY, GOLDEN / "spm.gguf"], **SMALL)


def test_smallest_budget_that_is_named_fits(here: Here, tmp_path: Path) -> None:
    profile, model = find_profile("pixel-9"), open_model(TINY)  # for whose apps this process's memory counts nothing
    space = Space(96, (), ("streaming",), ("f32",))
    weights = list(weights_of(model, "tiny", space, tmp_path))
    tight = Options(memory=1 << 20, backend="cpu")
    with pytest.raises(BudgetError, match="the smallest that fits is --memory") as refused:
        plan_all(weights, space, profile, tight)
    assert refused.value.smallest
    fitting = plan_all(weights, space, profile, replace(tight, memory=refused.value.smallest))
    assert fitting.candidates
    with pytest.raises(BudgetError, match=r"state --energy [\d.e-]+J") as refused:
        plan_all(weights, space, profile, Options(energy=1e-9, backend="cpu"))
    named = float(re.search(r"--energy ([\d.e-]+)J", str(refused.value))[1])  # type: ignore[index]
    assert plan_all(weights, space, profile, Options(energy=named, backend="cpu")).candidates


def test_apps_have_neither_other_engines_nor_every_policy(tmp_path: Path) -> None:
    space = Space(96, (), ("snapkv",), ("f16",))
    weights, phone = list(weights_of(open_model(TINY), "tiny", space, tmp_path)), find_profile("pixel-9")
    found = plan_all(weights, space, phone, Options())
    assert {each.cell.policy for each in found.candidates} == {"full"}
    assert any("no KV policy snapkv" in reason for reason, _ in found.refused)
    with pytest.raises(InputError, match="edge export compiles with the cpu engine"):
        plan_all(weights, space, phone, Options(backend="reference"))


def test_setting_command_reproduces_measurement(here: Here, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    profile, space = find_profile("raspberry-pi-5"), Space(96, ("Q4_0",), ("streaming",), ("f32",))
    options = Options(memory=4 << 30, energy=1000.0, backend="reference")
    weights = list(weights_of(open_model(TINY), str(TINY), space, tmp_path))
    (last,) = [each for each in plan_all(weights, space, profile, options).candidates
               if each.weights.type and each.rows == 16 and each.threads == 1]  # fmt: skip
    making, _, ran = command_of(last, profile, options, 96).partition(" && ")
    assert making == f"edge quantize {TINY} llama-gqa-tied-q4_0.gguf q4_0 --importance"
    made = shlex.split(making)[1:]
    made[2] = str(tmp_path / "made.gguf")
    assert inspect.signature(command).parameters["calibration_tokens"].default == TOKENS
    assert edge_here(*made, "--no-eval", "--calibration-tokens", str(FEW)).returncode == 0
    measured = open_weights(last.weights).file.path
    assert measured.read_bytes() == (tmp_path / "made.gguf").read_bytes()
    words = shlex.split(ran)
    assert words[:3] == ["edge", "run", "llama-gqa-tied-q4_0.gguf"]
    assert {"--memory", "4096MiB", "--energy", "1000J", "--kv-policy", "streaming"} <= set(words)
    done = edge("run", str(tmp_path / "made.gguf"), "a", "-n", "2", "--raw", *words[3:])
    assert done.returncode == 0, done.stderr


def test_command_runs_trials_in_processes_of_their_own(tmp_path: Path) -> None:
    page = tmp_path / "front.html"
    flags = ["--device", "raspberry-pi-5", "--backend", "reference", "--policies", "full", "--types", "q8_0"]
    flags += ["--tokens", "96"]
    found = json_here("search", str(TINY), *flags, "-o", str(page), "--json", EDGE_CACHE=str(tmp_path / "cache"))
    assert found["measured"] == 2
    assert found["trial_peak"] > 10 << 20
    assert found["points"][0]["quality"]["kl"] == 0.0
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_trial_stays_within_its_memory(here: Here) -> None:
    search(TINY, **{**SMALL, "policies": ["full"], "types": []})
    assert "budget is 2.0 MiB" in run_trial(here.ran[0], 2 << 20).reason


def test_cluster_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "distributed", None)
    with pytest.raises(EdgeError, match=r"pip install 'edge-runtime\[search\]'"):
        search(TINY, scheduler="tcp://127.0.0.1:9", **SMALL)


@pytest.mark.exhaustive
def test_worker_that_dies_loses_no_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers in processes of their own, one of which is killed while it runs a trial."""
    distributed = pytest.importorskip("distributed")  # the extra search
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match="no Dask scheduler answers there"):
        search(TINY, scheduler="tcp://127.0.0.1:9", **SMALL)
    killed = list[int]()
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, memory_limit="2GiB"
    ) as cluster:

        def kill_one(label: str, done: int, total: int) -> None:
            if done == 1 and not killed:
                killed.append(next(iter(cluster.workers.values())).pid)
                os.kill(killed[0], signal.SIGKILL)

        found = search(TINY, scheduler=cluster.scheduler_address, on_progress=kill_one, **SMALL)
    assert killed
    assert found.failed == ()
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "other"))
    use(Here(), monkeypatch)
    alone = search(TINY, **SMALL)
    assert [each.command for each in found.points] == [each.command for each in alone.points]
    for ours, theirs in zip(found.points, alone.points, strict=True):
        assert ours.quality.kl == pytest.approx(theirs.quality.kl, rel=1e-6)
