"""The history of runs: what is kept, what damage and other processes do to it."""

from __future__ import annotations

import json
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from conftest import GOLDEN, SHARED_FIXTURES, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import edge
from edge.backends.base import EngineConfig
from edge.cli.commands import app
from edge.run import history
from edge.run.decoding.generation import Generation
from edge.run.history import Phase, Run, Setting, append, clear_history, earlier_runs, history_path, history_size

MODEL = str(GOLDEN / "llama-gqa-tied.gguf")
SETTING = Setting("a processor", "0" * 16, "cpu", "f16", 2)
CONFIG = EngineConfig(capacity=64, chunk=8, kv_dtype="f16", threads=2)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EDGE_HISTORY", raising=False)
    return tmp_path / "cache"


def a_run(at: float = 1.0, setting: Setting = SETTING) -> Run:
    return Run(at, setting, "llama", "full", 64, Phase(30, 0.5, 15.0, 2.0), Phase(9, 0.3, 34.5), "counter", "rapl", 1)


numbers = st.floats(1e-6, 1e6)
phases = st.none() | st.builds(Phase, st.integers(1, 9999), numbers, numbers, st.none() | numbers)
runs = st.builds(
    Run, numbers, st.just(SETTING), st.text(max_size=20), st.just("full"), st.integers(1, 9999), phases, phases,
    st.none() | st.just("counter"), st.none() | st.text(max_size=20), st.none() | st.integers(0, 1 << 40),
)  # fmt: skip


@settings(suppress_health_check=SHARED_FIXTURES, max_examples=examples(10))
@given(kept=st.lists(runs, max_size=30))
def test_kept_runs_are_listed_newest_first(kept: list[Run]) -> None:
    clear_history()
    for run in kept:
        append(run)
    assert earlier_runs(SETTING) == kept[::-1][:20]
    assert history_size()[0] == len(kept)
    assert earlier_runs(replace(SETTING, threads=3)) == []


@settings(suppress_health_check=SHARED_FIXTURES, max_examples=examples(30))
@given(at=st.integers(0, 700), junk=st.binary(max_size=30), cut=st.integers(0, 60))
def test_damage_costs_only_damaged_lines(at: int, junk: bytes, cut: int) -> None:
    clear_history()
    for moment in range(4):
        append(a_run(moment))
    data = history_path().read_bytes()
    at = min(at, len(data) // 2)  # in the first two lines
    history_path().write_bytes(data[:at] + junk + data[at + cut :])
    found = earlier_runs(SETTING)
    assert found[0] == a_run(3)
    append(a_run(9))
    assert earlier_runs(SETTING)[0] == a_run(9)


def test_history_size_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MOST_BYTES", 4000)
    for moment in range(60):
        append(a_run(moment))
        assert history_path().stat().st_size <= 4000
    found = earlier_runs(SETTING)
    assert [run.at for run in found] == [59 - each for each in range(len(found))]
    assert len(found) >= 3
    assert [path.name for path in history_path().parent.iterdir()] == ["runs.jsonl"]


def _append_many(first: int) -> None:
    for moment in range(first, first + 40):
        append(a_run(moment))


def test_concurrent_writers_lose_no_lines() -> None:
    spawn = get_context("spawn")
    writers = [spawn.Process(target=_append_many, args=(first,)) for first in (0, 1000)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert history_size()[0] == 80
    moments = [json.loads(line)["at"] for line in history_path().read_text().splitlines()]
    assert sorted(moments) == [first + each for first in (0, 1000) for each in range(40)]


@pytest.mark.parametrize("off", ["0", "off", "False"])
def test_history_is_off_by_variable(monkeypatch: pytest.MonkeyPatch, off: str) -> None:
    monkeypatch.setenv("EDGE_HISTORY", off)
    append(a_run())
    assert not history_path().exists()


def test_held_or_cut_runs_are_left_out() -> None:
    with edge.load(MODEL, backend="reference", max_kv_size=64) as session:
        session.generate("one two three", raw=True, max_tokens=4, ignore_eos=True)
        report, plan, run = session.report, session.plan, cast(Generation, SimpleNamespace(is_typical=True))
    held, cut = replace(report.timings, paused_s=1.0), replace(report.tokens, ran=1)
    changed = [replace(report, timings=held), replace(report, tokens=cut), replace(report, actions=("x",))]
    clear_history()
    for each in (*changed, report):
        history.remember_run(session.spec, run, plan, each)
    assert history_size()[0] == 1


@pytest.mark.usefixtures("never_held")
def test_runs_are_remembered_and_can_be_forgotten() -> None:
    command = CliRunner()
    flags = ["--raw", "--ignore-eos", "--backend", "reference", "--json"]
    done = command.invoke(app, ["run", MODEL, "-p", "one two three", "-n", "12", *flags])
    assert done.exit_code == 0, done.output
    report = json.loads(done.output)
    [run] = map(history._read, history_path().read_bytes().splitlines())
    assert run.decode.tokens == 11
    assert run.decode.seconds == pytest.approx(11 / report["timings"]["decode_tok_s"])
    assert run.decode.context == pytest.approx(report["tokens"]["prompt"] + 5.5, abs=1)
    assert run.prefill.tokens == report["tokens"]["prompt"]
    assert run.prefill.joules == report["energy"]["prefill"]
    assert run.peak == report["memory"]["peak_rss"]
    assert "three" not in history_path().read_text()

    benched = ["bench", MODEL, "-p", "8", "-n", "9", "-r", "1", "--backend", "reference", "--energy", "--json"]
    assert command.invoke(app, benched).exit_code == 0
    assert history_size()[0] == 3
    assert "history of 3 runs" in command.invoke(app, ["cache", "list"]).output
    assert json.loads(command.invoke(app, ["cache", "list", "--json"]).output)["history"]["runs"] == 3
    assert command.invoke(app, ["cache", "clear", "--kind", "kernels"]).exit_code == 0
    assert history_size()[0] == 3
    assert "removed 1 entry" in command.invoke(app, ["cache", "clear", "--kind", "history"]).output
    assert history_size() == (0, 0)
