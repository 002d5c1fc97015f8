"""Tuning of static graphs: their forms, compiled for a chip that is not here, and timed on the CPU, which is."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import GOLDEN
from typer.testing import CliRunner

import edge
from edge.backends.onnx.npu.contexts import Contexts
from edge.backends.onnx.npu.form import find_form, make_form
from edge.backends.onnx.npu.lookup import make_subject
from edge.backends.onnx.tuning import form_of, make_space
from edge.backends.tuning import defaults
from edge.cli.commands import app
from edge.converters.npu import NpuTarget, plan_form
from edge.converters.npu_child import Request
from edge.devices.profile import Npu
from edge.devices.profiles import find_profile
from edge.devices.records import Record, record_name, write_record
from edge.errors import EdgeError, EngineError
from edge.model.model import open_model
from edge.options import Options
from edge.plan.engines import plan_here
from edge.plan.plan import Plan
from edge.tuning.forms import try_forms

MODEL = GOLDEN / "llama-gqa-tied.gguf"


def tune(*flags: str) -> Any:
    return CliRunner().invoke(app, ["tune", *flags])


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGE_TUNING", str(tmp_path / "records"))
    return tmp_path / "records"


# Forms of a chip that is not here


def test_forms_are_compiled_and_measured(records: Path) -> None:
    """By QNN's compiler, whose contexts hold the weights at least."""
    pytest.importorskip("onnxruntime_qnn")
    answer = tune(str(MODEL), "--provider", "QNN", "--trials", "2", "--max-kv-size", "64", "--json")
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.output)
    assert (found["device"], found["npu"], found["limit"]) == ("galaxy-s24", "Qualcomm Hexagon v75", 3.75e9)
    assert [(len(each["contexts"]), each["form"]["rows"]) for each in found["tried"]] == [(1, 64), (2, 64)]
    for each in found["tried"]:
        assert each["fits"]
        assert each["seconds"] > 0
        assert each["bytes"] == sum(each["contexts"]) == each["weights"] + each["beyond_weights"]
        assert 1 < each["bytes"] / each["weights"] < 3
    assert found["record"] is None
    assert "no NPU is here" in found["why"]
    assert not records.exists()


def test_a_compiler_that_takes_longer_than_the_time_is_ended() -> None:
    pytest.importorskip("onnxruntime_qnn")
    model, started = open_model(MODEL), time.monotonic()
    found = try_forms(model.file, model.spec, NpuTarget("galaxy-s25"), trials=80, seconds=0.3)
    assert (found.tried, found.late, found.candidates) == ((), True, 20)  # 5 chunks, 2 shards, the head here or there
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("ending", [KeyboardInterrupt, EngineError("no room")])
def test_what_was_compiled_stays(monkeypatch: pytest.MonkeyPatch, ending: BaseException) -> None:
    pytest.importorskip("onnxruntime_qnn")

    def compiling(request: Request, timeout: float) -> Contexts:
        if request.form.head == "host":
            raise ending
        size = 200_000 if request.form.shards == 2 else 300_000
        return Contexts(("npu.0.bin",), (("chunk", "step"),), "2.0", "0" * 64, (size,), 1.5)

    monkeypatch.setattr("edge.tuning.forms.compile_in_child", compiling)
    answer = tune(str(MODEL), "--provider", "qnn", "--device", "galaxy-s25", "--trials", "3")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in answer.output.splitlines() if "|" in line]
    assert [row[:4] for row in rows[2:4]] == [["npu", "32", "2", "1.5 s"], ["npu", "32", "1", "1.5 s"]]
    if ending is KeyboardInterrupt:
        assert answer.exit_code != 0
        assert len(rows) == 4
        assert "2 of 3 forms" in answer.output
    else:
        assert answer.exit_code == 0
        assert (rows[-1][:3], rows[-1][4]) == (["host", "32", "1"], "refused")
        assert "chunk 32, shards 1, head host: no room" in answer.output
    assert "no record is written" in answer.output


def test_forms_keep_to_the_model_and_to_what_the_npu_multiplies() -> None:
    spec = open_model(MODEL).spec
    usual = make_form(spec, 40, 16, "f32", head="host")
    space = make_space(spec, usual)
    assert {field.name: field.choices for field in space} == {"chunk": (8, 16), "shards": (1, 2), "host_head": (1,)}
    assert form_of(spec, usual, defaults(space)) == usual
    ringed = open_model(GOLDEN / "gemma3.gguf").spec
    usual = make_form(ringed, ringed.context, 8, "f16")
    longer = form_of(ringed, usual, defaults(make_space(ringed, usual)) | {"chunk": 32})
    assert longer.ring_rows > usual.ring_rows  # a chunk reads rows that it overwrites


# Timed here


def test_the_forms_of_a_provider_that_computes_here_are_timed(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge.backends.onnx.tuning.usable_cores", lambda: 1)  # other tests run beside this one
    line = [str(MODEL), "--provider", "cpu-static", "--max-kv-size", "64"]
    found = json.loads(tune(*line, "--trials", "3", "--time", "2m", "--json").output)
    assert found["subject"]["isa"] == "onnx cpu-static"
    assert found["measured"] == 3
    assert found["values"].keys() == {"shards", "host_head", "chunk"}
    assert "of 64" in found["score"]
    assert (records / f"{found['name']}.json").exists()
    plan = plan_of(provider="cpu-static")
    assert found["name"] in plan.tuned
    assert plan.config.chunk == found["values"]["chunk"]
    shown = json.loads(tune(*line[:3], "--show", "--json").output)
    assert shown["record"]["name"] == found["name"]
    assert sum(shown["fates"].values()) == 3


def plan_of(**options: Any) -> Plan:
    model = open_model(MODEL)
    return plan_here(model.file, model.spec, Options.parse(**options))[1]


def write(provider: str, npu: Npu | None, values: dict[str, int | bool]) -> Record:
    subject = make_subject(open_model(MODEL).spec, provider, npu, "f16")
    name = record_name(subject, "golden")
    record = Record(name, "host", subject, "golden", "x", values, "tuned", 1.2, None, 5, 9.0, "2026-11-23", {})
    write_record(record)
    return record


def test_runs_follow_the_record_and_flags_win() -> None:
    wanted: dict[str, Any] = {"provider": "cpu-static", "max_kv_size": 64}
    with edge.load(MODEL, **wanted) as session:
        assert (session.plan.tuned, session.plan.config.chunk) == ("default", 32)
        expected = session.generate("Once upon a time there was", max_tokens=12, ignore_eos=True)
    record = write("cpu-static", None, {"chunk": 16, "shards": 2, "host_head": 1})
    with edge.load(MODEL, **wanted) as session:
        plan = session.plan
        assert plan.tuned == f"record {record.name} (interrupted: not compared with the defaults)"
        form = find_form(session.model.spec, plan.config)
        assert (form.chunk, form.shards, form.head) == (16, 2, "host")
        assert session.generate("Once upon a time there was", max_tokens=12, ignore_eos=True) == expected
    assert plan_of(**wanted, prefill_step_size=8).config.chunk == 8
    assert plan_of(**wanted, kv_dtype="f32").tuned == "default"
    assert plan_of(backend="onnx", max_kv_size=64).tuned == "default"


@pytest.mark.parametrize("values", [{"chunk": 1 << 20}, {"shards": 0}, {"host_head": 2}, {"spins": 1}])
def test_values_that_tuning_does_not_choose_are_ignored(
    caplog: pytest.LogCaptureFixture, values: dict[str, int | bool]
) -> None:
    write("cpu-static", None, values)
    assert plan_of(provider="cpu-static").tuned == "default"
    assert "does not know" in caplog.text


def test_what_is_converted_for_an_npu_follows_the_record_of_its_chip(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime_qnn")
    npu, model = find_profile("galaxy-s24").npu, open_model(MODEL)
    record = write("qnn", npu, {"chunk": 16, "shards": 2, "host_head": 0})

    def form(device: str, **sizes: int) -> tuple[int, int]:
        planned = plan_form(model.file, model.spec, NpuTarget(device, **sizes))
        return planned.chunk, planned.shards

    assert form("galaxy-s24") == (16, 2)
    assert form("galaxy-s24", chunk=8) == (8, 2)
    assert form("galaxy-s24", rows=16) == (8, 2)
    assert form("galaxy-s25") == (32, 1)  # another instruction set
    flags = ["--to", "onnx", "--npu", "--device", "galaxy-s24", "--max-kv-size", "32"]
    answer = CliRunner().invoke(app, ["convert", str(MODEL), str(tmp_path / "phone"), *flags])
    assert f"chunk, shards and head: record {record.name}" in answer.output
    assert len(list((tmp_path / "phone").glob("npu.*.bin"))) == 2
    again = tune(str(tmp_path / "phone"), "--provider", "qnn")
    assert "is compiled already" in str(again.exception)


# Errors


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--provider", "cpu"], "--provider cpu runs graphs of any size"),
        (["--provider", "qnn", "--device", "raspberry-pi-5"], "its profile names no NPU"),
        (["--provider", "qnn", "--device", "nothing"], "unknown device 'nothing'"),
        (["--provider", "qnn", "--backend", "gpu"], "leave --backend gpu out"),
        (["--provider", "qnn", "--tracker", "a:1", "--key", "b"], "leave --provider out"),
        (["--provider", "qnn", "--max-kv-size", "3"], "--max-kv-size must be from 8 to"),
        (["--provider", "qnn", "--kv-dtype", "int8"], "--kv-dtype int8: on an NPU this model is run with f16 or f32"),
        (["--max-kv-size", "64"], "state --provider, too"),
        (["--provider", "cpu-static", "--max-kv-size", "32"], "--max-kv-size must be from 64 to"),
        (["--provider", "cpu-static", "--kv-dtype", "int8"], "--kv-dtype int8: on an NPU this model is run with f16"),
        (["--provider", "cpu-static", "--device", "galaxy-s24"], "leave --device galaxy-s24 out"),
        (["--provider", "cpu-static", "--show"], "run edge tune MODEL --provider cpu-static"),
        (["--provider", "qnn", "--time", "0.3s"], "no form was compiled within --time 0.3s: give --time 5m"),
        (["--provider", "qnn", "--show"], "emulates an NPU here"),
        (["--provider", "qnn", "--show", "--device", "galaxy-s24"], "leave --device galaxy-s24 out"),
    ],
)
def test_bad_requests_are_refused(flags: list[str], said: str) -> None:
    pytest.importorskip("onnxruntime_qnn")
    answer = tune(str(MODEL), *flags)
    assert said.replace("MODEL", str(MODEL)) in str(answer.exception)
    assert isinstance(answer.exception, EdgeError)
