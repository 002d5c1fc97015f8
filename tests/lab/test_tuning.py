"""Tuning: the search against planted optima, records and what runs make of them, the command, and the tokens."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import all_logits, load_engine
from small_models import Small, write_small
from test_cli import edge_here as edge
from test_cli import json_here as edge_json

from edge.backends import find_backend
from edge.backends.base import Engine
from edge.devices import records
from edge.devices.records import Comparison, Record, Subject, nearest, read_records, record_name, write_record
from edge.errors import EngineError
from edge.model.model import Model, open_model
from edge.options import Options
from edge.plan.plan import Plan, make_plan

pytest.importorskip("edge.backends.tvm")
pytest.importorskip("tvm_ffi")
if platform.machine() not in ("x86_64", "AMD64"):
    pytest.skip("the native engine runs on x86-64", allow_module_level=True)

from edge.backends.tuning import STEP, Field, Values, defaults, relevant
from edge.backends.tvm.targets import TARGETS, choose_target, with_tuning
from edge.backends.tvm.tuning.lookup import make_subject
from edge.backends.tvm.tuning.space import allowed, make_space
from edge.lab.tuning.effects import effects, fates
from edge.lab.tuning.races import Limits, Trial, compare, is_significant, search
from edge.lab.tuning.setting import Setting
from edge.lab.tuning.table import read_trials
from edge.lab.tuning.tune import Result, Status, tune

SPACE = make_space(TARGETS[0], "f16", 2, 512)
PLANTED = {"step_block": 16, "fetch_ahead": 4096, "gemm_tokens": 12, "chunk": 256, "spins": 1000}
NO_END = Limits(10_000, math.inf, time.monotonic)


@dataclass
class Machine:
    """A measured function with noise: every field that is off its optimum costs `cost`. Calls are counted."""

    optimum: Values
    cost: float = 0.08
    noise: float = 0.02
    space: tuple[Field, ...] = SPACE
    interrupt_at: int | None = None
    random: random.Random = field(default_factory=lambda: random.Random(1))
    calls: list[tuple[Values, str]] = field(default_factory=list)

    def measure(self, values: Values, part: str) -> float:
        if len(self.calls) == self.interrupt_at:
            raise KeyboardInterrupt
        self.calls.append((values, part))
        wrong = [name for name in relevant(self.space, values, (part,)) if values[name] != self.right(name, values)]
        return (1 + self.cost) ** len(wrong) * math.exp(self.random.gauss(0, self.noise))

    def right(self, name: str, values: Values) -> int:
        return self.optimum.get(name, values[name])  # the others do not matter


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(tmp_path_factory.mktemp("tiny") / "tiny.gguf", Small(layers=2, types="Q4_0"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of records."""
    monkeypatch.setenv("EDGE_TUNING", str(tmp_path / "records"))
    monkeypatch.setattr(records, "_complained", set())
    return tmp_path / "records"


# The space


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_default_tuning_equals_the_target(target: Any) -> None:
    space = make_space(target, "f16", 4, 512)
    values = defaults(space)
    assert with_tuning(target, values) == target
    assert (values["threads"], values["chunk"]) == (4, 512)
    assert allowed(target, values)
    assert not any(allowed(target, wrong) for wrong in ({"score_rows": 0}, {"gemm_tokens": 1 << 20}, {"other": 1}))
    assert "threads" not in defaults(make_space(target, "f16", 1, 512))
    for each in space:
        assert each.default in each.choices
        assert len(set(each.choices)) == len(each.choices) > 1
        assert all(allowed(target, values | {each.name: choice}) for choice in each.choices)


# The search


@pytest.mark.parametrize("seed", range(2))
def test_planted_optimum_is_found_in_noise(seed: int) -> None:
    machine = Machine(PLANTED)
    found = search(SPACE, machine.measure, NO_END, seed=seed)
    assert found.values | PLANTED == found.values
    assert not found.interrupted
    comparison = compare(machine.measure, defaults(SPACE), found.values)
    assert is_significant(comparison)
    assert comparison.low <= comparison.floor <= comparison.median <= comparison.high


@pytest.mark.parametrize("deadline", [60, 400])
def test_comparison_is_within_time(deadline: int) -> None:
    """By a clock on which every measurement takes a second."""
    now, machine = [0.0], Machine(PLANTED)

    def measure(values: Values, part: str) -> float:
        now[0] += 1
        return machine.measure(values, part)

    limits = Limits(200, deadline, lambda: now[0])
    found = search(SPACE, measure, limits)
    assert found.late == (deadline < 2000 or len(found.trials) < 200)
    assert now[0] < deadline
    if found.values != defaults(SPACE):
        compare(measure, defaults(SPACE), found.values)
        assert now[0] <= deadline
    if deadline == 60:  # the comparison alone would take 68 s
        assert found.trials == ()


def test_compile_error_fails_one_trial() -> None:
    def measure(values: Values, part: str) -> float:
        if values["score_rows"] == 16:
            raise EngineError("too many registers")
        return 1.0

    found = search(SPACE, measure, NO_END)
    failed = [trial for trial in found.trials if trial.fate == "failed"]
    assert failed
    assert all(trial.changes["score_rows"] == 16 and trial.ratio is trial.score is None for trial in failed)


# A whole tuning


def setting(machine: Machine) -> Setting:
    @contextmanager
    def opened(on_compile: Callable[[], None]) -> Iterator[Machine]:
        on_compile()
        yield machine

    subject = Subject("cpu", "family", 2, "avx512vnni", "f16", {"hidden": 64})
    return Setting(subject, machine.space, "seconds of nothing", opened)


def tuning(model: Model, machine: Machine, trials: int = 200, **more: Any) -> Result:
    return tune(model.spec.label, setting(machine), trials=trials, seconds=100, **more)


def test_gain_is_recorded_with_its_spread(tiny: Path, folder: Path) -> None:
    statuses: list[Status] = []
    result = tuning(open_model(tiny), Machine(PLANTED), on_status=statuses.append)
    record = result.record
    assert read_records() == [record]
    assert record.kept == "tuned"
    assert record.values | PLANTED == record.values
    assert record.gain == pytest.approx(record.comparison.median, abs=1e-3)
    assert record.trials == result.measured == statuses[-1].trials
    assert len(read_trials(records.trials_path(record.name))) == record.trials
    assert statuses[-1].best < 1


@pytest.mark.parametrize("seed", range(2))
def test_gain_is_never_negative_and_noise_is_none(tiny: Path, folder: Path, seed: int) -> None:
    """Nothing matters on this machine, and its noise is large."""
    machine = Machine({}, noise=0.1, random=random.Random(seed))
    record = tuning(open_model(tiny), machine, trials=40, seed=seed).record
    assert record.gain >= 1
    if record.kept == "default":
        assert record.gain == 1
        assert record.values == defaults(SPACE)
        again = tuning(open_model(tiny), machine, trials=40, seed=seed)
        assert again.measured or not record.comparison  # races that it contradicts are not built upon
    else:  # one in forty
        assert record.comparison.floor > 1


def test_interrupted_tuning_is_kept_and_resumed(tiny: Path, folder: Path) -> None:
    model = open_model(tiny)
    first = tuning(model, Machine(PLANTED, interrupt_at=400))
    assert first.interrupted
    assert read_records() == [first.record]
    assert first.record.comparison is None
    assert first.record.kept == "tuned"
    assert first.record.gain > 1
    second = tuning(model, Machine(PLANTED))
    assert not second.interrupted
    assert second.measured == second.record.trials - first.record.trials
    assert read_records() == [second.record]
    # What was compared is worth more than what was not.
    tuning(model, Machine(PLANTED, interrupt_at=50), force=True)
    assert read_records() == [second.record]


# Records


def make_record(subject: Subject, values: Values, **more: Any) -> Record:
    name = record_name(subject, "llama 0.1M Q4_0")
    comparison = Comparison(1.2, 1.15, 1.1, 1.3, 17)
    whole = Record(
        name, "host", subject, "llama 0.1M Q4_0", "score", values, "tuned", 1.2, comparison, 7, 60.5, "2026-11-21",
        {"edge": "0.1.0"},
    )  # fmt: skip
    return replace(whole, **more)


HERE = Subject("EPYC 9", "AMD 26", 2, "avx2", "f16", {"hidden": 576, "layers": 30})


def test_nearest_record_has_same_kernels() -> None:
    def other(**changes: Any) -> Record:
        return make_record(replace(HERE, **changes), {})

    same = other()
    other_shape = other(shape={"hidden": 576, "layers": 12})
    wider = other(shape={"hidden": 960, "layers": 12})
    relative = other(cpu="EPYC 8")
    stranger = other(cpu="Xeon", family="Intel 6")
    ranked = [same, other_shape, wider, relative, stranger]
    foreign = [other(isa="avx512vnni"), other(kv_dtype="int8"), other(shape={"hidden": 4096, "layers": 30})]
    while ranked:
        assert nearest([*reversed(ranked), *foreign], HERE) is ranked.pop(0)
    assert nearest(foreign, HERE) is None


CORRUPT: list[tuple[Callable[[str], str], str]] = [
    (lambda text: text[:100], "Unterminated string"), (lambda text: "[]", "Record must be a table"),
    (lambda text: text.replace('"gain": 1.2', '"gain": 0.9'), "gain must be a number from 1"),
    (lambda text: text.replace('"threads": 2', f'"threads": {10**18}'), "values.threads must be"),
    (lambda text: text.replace('"hidden"', '"hiding"'), "subject.shape must be"),
    (lambda text: text.replace('"schema": 1', '"schema": 99'), "schema 99 is not 1"),
    (lambda text: text.replace('"name": "', '"name": "x'), "it is the record of 'x"),
    (lambda text: text + " " * 100_000, "too long for a record"),
]  # fmt: skip


def test_corrupt_records_are_ignored_with_one_warning(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_record(make_record(HERE, {"threads": 2}))
    whole = path.read_text()
    for damage, why in CORRUPT:
        path.write_bytes(damage(whole).encode(errors="surrogateescape"))
        records._complained.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "edge"):
            assert read_records() == []
            assert read_records() == []
        assert len(caplog.records) == 1
        assert f"{path} is ignored: " in caplog.text
        assert why in caplog.text


# What runs make of them


def record_for(model: Model, values: Values, **more: Any) -> Record:
    subject = make_subject(model.spec, choose_target(), "f16")
    return make_record(replace(subject, **more), values)


def plan_for(model: Model, memory: int | None = None, **options: Any) -> Plan:
    backend = find_backend("cpu", model.file, model.spec)
    return make_plan(model.spec, backend, Options(**options, memory=memory))


def test_plan_follows_record_and_flags_win(tiny: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = open_model(tiny)
    full = {"kv_policy": "full"}
    assert plan_for(model, **full).tuned == "default"
    monkeypatch.setattr("edge.plan.resolved.usable_cores", lambda: 2)
    record = record_for(model, {"threads": 1, "chunk": 64, "chunk_block": 64, "step_dealt": True})
    write_record(record)
    plan = plan_for(model, **full)
    assert plan.tuned == f"record {record.name}"
    assert (plan.config.threads, plan.config.chunk) == (1, 64)
    assert plan.config.tuning == {"chunk_block": 64, "step_dealt": True}
    flagged = plan_for(model, threads=2, prefill_step_size=128, **full)
    assert (flagged.config.threads, flagged.config.chunk) == (2, 128)
    assert flagged.config.tuning == plan.config.tuning
    assert plan_for(model, kv_dtype="int8", **full).tuned == "default"
    assert json.loads(json.dumps(plan.to_dict()))["tuned"] == plan.tuned


def test_threads_of_another_processor_say_nothing(tiny: Path, folder: Path) -> None:
    model = open_model(tiny)
    write_record(record_for(model, {"threads": 1, "spins": 1000}, cpu="another"))
    chosen = plan_for(model).config
    assert chosen.threads == plan_for(model, kv_dtype="int8").config.threads
    assert chosen.tuning == {"spins": 1000}


# The engine


def test_every_field_off_its_default_gives_same_tokens(tmp_path: Path, engines: Callable[[Engine], Engine]) -> None:
    chooser = random.Random(7)
    values = {
        each.name: chooser.choice([choice for choice in each.choices if choice != each.default])
        for each in make_space(choose_target(), "f32", 3, 64)
    }
    model = open_model(write_small(tmp_path / "m.gguf", Small(layers=2, heads=6, kv_heads=3, hidden=96, types="Q4_0")))
    tokens = np.random.default_rng(3).integers(3, model.spec.vocab, 90).astype(np.int32)
    expected = all_logits(model, tokens, chunk=90, logits_rows=90)
    tuned = {name: value for name, value in values.items() if name not in ("threads", "chunk")}
    engine = engines(load_engine(model, "cpu", "f32", chunk=values["chunk"], threads=values["threads"], tuning=tuned))
    np.testing.assert_allclose(engine.forward(tokens), expected[-1], rtol=0, atol=1e-3)
    engine.kv.truncate(40)
    for at in range(40, 90):
        logits = engine.forward(tokens[at : at + 1])
        assert logits.argmax() == expected[at].argmax()
        np.testing.assert_allclose(logits, expected[at], rtol=0, atol=1e-3)


# What is shown


def trial(changes: Values, against: Values, fate: str, ratio: float | None) -> Trial:
    score = ratio
    return Trial(changes, against, (STEP,), fate, 9, ratio, {}, score, 1.0)


def test_effects_are_relative_to_defaults() -> None:
    usual = {"spins": 10, "step_block": 8}
    tried = [
        trial({"spins": 20}, usual, "better", 0.9),
        trial({"step_block": 4}, {"spins": 20, "step_block": 8}, "no better", 1.0),
        trial({"spins": 40}, {"spins": 20, "step_block": 8}, "better", 0.5),
        trial({"spins": 10, "step_block": 4}, {"spins": 40, "step_block": 8}, "died", 3.0),
        trial({"step_block": 16}, {"spins": 40, "step_block": 8}, "failed", None),
    ]
    found = [(each.field, each.value, round(each.ratio, 3)) for each in effects(tried, usual)]
    assert found == [("spins", 20, 0.9), ("spins", 40, 0.45), ("step_block", 4, 1.0)]
    assert fates(tried) == {"better": 2, "no better": 1, "died": 1, "failed": 1}


# The command


def test_time_for_no_trial_is_error(tiny: Path, folder: Path) -> None:
    done = edge("tune", str(tiny), "--time", "0.01s", "--json")
    assert done.returncode == 3
    assert "no trial within --time 0.01s" in done.stderr
    assert done.stderr.endswith("give --time 5m\n")
    assert json.loads(done.stdout)["error"]["type"] == "BudgetError"
    assert not list(folder.glob("*.json"))


def test_command_from_tuning_to_run(tiny: Path, folder: Path) -> None:
    found = edge_json("tune", str(tiny), "--trials", "1", "--time", "10m", "--json")
    assert found["trials"] == found["measured"] == 1
    assert not found["late"]
    assert found["gain"] >= 1
    assert not found["interrupted"]
    again_measured = edge_json("tune", str(tiny), "--trials", str(found["trials"]), "--json")["measured"]
    if found["comparison"] is None or found["kept"] == "tuned":  # else the trials were not worth keeping
        assert again_measured == 0
    found = edge_json("tune", "--show", str(tiny), "--json")["record"]
    known = edge_json("tune", "--show", "--json")["records"]
    assert [each["name"] for each in known] == [found["name"]]
    shown = edge_json("tune", "--show", str(tiny), "--json")
    assert len(shown["trials"]) == found["trials"]
    assert sum(shown["fates"].values()) == found["trials"]
    text = edge("tune", "--show", str(tiny))
    assert text.returncode == 0
    assert found["score"] in text.stdout
    planned = edge_json("plan", str(tiny), "--json")
    assert found["name"] in planned["tuned"]
    report = edge_json("run", str(tiny), "--raw", "-p", "hi", "-n", "2", "--json")
    assert report["plan"]["tuned"] == planned["tuned"]
    assert planned["tuned"] in edge("plan", str(tiny)).stdout


@pytest.mark.exhaustive
def test_device_behind_tracker_is_tuned(tiny: Path, folder: Path, tmp_path: Path) -> None:
    """Tracker and server on loopback: the candidate travels as a library, and is timed over there."""
    pytest.importorskip("tornado")
    pytest.importorskip("cloudpickle")
    port = 20_000 + os.getpid() % 10_000
    tracker = f"127.0.0.1:{port}"
    with (
        _service(tmp_path, "rpc_tracker", "--host", "127.0.0.1", "--port", port, "--port-end", port + 1),
        _service(
            tmp_path, "rpc_server", "--host", "127.0.0.1", "--port", port + 10, "--port-end", port + 20,
            "--tracker", tracker, "--key", "loop",
        ),
    ):  # fmt: skip
        found = edge_json(
            "tune", str(tiny), "--device", "pi5", "--tracker", tracker, "--key", "loop", "--trials", "1", "--time",
            "10m", "--json",
        )  # fmt: skip
    assert (found["device"], found["subject"]["cpu"]) == ("pi5", "pi5")
    assert found["trials"] == 1
    assert found["gain"] >= 1
    assert all(each.ratio for each in read_trials(records.trials_path(found["name"])))


def listens(pid: int) -> bool:
    """Whether it, or a process that it started, takes connections."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        every = [process, *process.children(recursive=True)]
        return any(found.status == psutil.CONN_LISTEN for each in every for found in each.net_connections("tcp"))
    return False


@contextmanager
def _service(folder: Path, name: str, *arguments: object) -> Iterator[None]:
    """One of TVM's RPC programs, and all that it starts."""
    command = [sys.executable, "-m", f"tvm.exec.{name}", *map(str, arguments)]
    with open(folder / f"{name}.log", "w") as log:
        child = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "TVM_NUM_THREADS": "2"},
        )  # fmt: skip
        try:
            while not listens(child.pid):  # it says nowhere that it is ready
                assert child.poll() is None
                time.sleep(0.05)
            yield
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
