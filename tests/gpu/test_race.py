"""Which engine `auto` takes where there is a GPU: the faster, by a measurement that is made once. Records of tuning,
and the times of dispatches."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conftest import GOLDEN, first_adapter, open_golden, run_child

from edge.backends import engine_named
from edge.backends.base import PHASES, Backend, EngineConfig, Operator
from edge.backends.operators import by_name
from edge.backends.tvm.gpu.hosts import choose_adapter
from edge.backends.tvm.gpu.tuning import find_record, find_tuned, make_subject
from edge.devices.graphics import seen_gpus
from edge.devices.profiles import find_profile
from edge.devices.records import Record, Subject, record_name, write_record
from edge.errors import EngineError
from edge.lab.prediction.forecast import forecast
from edge.lab.prediction.predict import Wanted, predict
from edge.model.model import Model
from edge.model.structure.spec import ModelSpec
from edge.options import Options
from edge.plan import engines
from edge.plan.engines import Pace, Race, find_race, keep_race, plan_here
from edge.plan.plan import make_plan
from edge.run.history import Phase, Run, Setting
from edge.run.starting.loading import load
from edge.run.starting.race import race

PATH = GOLDEN / "llama-gqa-tied.gguf"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Model:
    """With a cache folder of its own for the records, and lavapipe chosen by name, as it must be to take part."""
    pytest.importorskip("tvm")
    first_adapter("wgpu")
    monkeypatch.setenv("EDGE_GPU", "wgpu:0")
    model = open_golden("llama-gqa-tied").model
    monkeypatch.setattr("edge.plan.engines.cpu_key", lambda: str(tmp_path))
    monkeypatch.setenv("EDGE_TUNING", str(tmp_path))
    return model


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("it is decided already")


def test_first_run_races_and_later_runs_use_its_result(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "has timed the GPU" in plan_here(model.file, model.spec, Options())[1].chosen
    with load(model, time="1h", max_kv_size=64) as session:  # its seconds are counted
        assert find_race(model.spec) is None
        assert session.plan.backend == "cpu"
    said, resolved, resolve = list[str](), list[str](), engines.resolve

    def counted(spec: ModelSpec, engine: Backend, *options: Any, **more: Any) -> Any:
        resolved.append(engine.NAME)
        return resolve(spec, engine, *options, **more)

    monkeypatch.setattr(engines, "resolve", counted)
    with load(model, max_kv_size=64, on_load=lambda part, doing="": said.append(doing)) as session:
        found = find_race(model.spec)
        assert found is not None
        assert "timing cpu and gpu, once for this model" in said
        assert sorted(resolved) == ["cpu", "gpu"]
        assert min(found.cpu.decode, found.cpu.prefill, found.gpu.decode, found.gpu.prefill) > 0
        assert (found.adapter, found.engine) == (choose_adapter().key, "cpu")
        assert session.plan.backend == ("gpu" if found.is_gpu_faster else "cpu")
        assert session.plan.chosen == found.about()
    monkeypatch.setattr("edge.run.starting.race.race", forbidden)
    load(model, max_kv_size=64).close()
    keep_race(model.spec, Race("an older driver", "cpu", cpu=Pace(100, 10), gpu=Pace(50, 20)))
    with pytest.raises(AssertionError, match="it is decided"):  # not any more
        load(model, max_kv_size=64)


def test_faster_engine_is_chosen_if_it_fits(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**options: Any) -> str:
        return plan_here(model.file, model.spec, Options.parse(max_kv_size=64, **options))[0].NAME

    key = choose_adapter().key
    keep_race(model.spec, Race(key, "cpu", cpu=Pace(100, 10), gpu=Pace(50, 20)))  # 14.1 s and 9 s
    assert chosen() == "gpu"
    assert chosen(gpu_memory="1MiB") == "gpu"
    assert chosen(gpu_memory="100KiB") == "cpu"
    assert chosen(kv_dtype="int4") == "gpu"
    assert chosen(backend="cpu") == "cpu"
    assert plan_here(model.file, model.spec, Options(backend="cpu"))[1].chosen == ""
    keep_race(model.spec, Race("another card", "cpu", cpu=Pace(100, 10), gpu=Pace(50, 20)))
    assert chosen() == "cpu"
    keep_race(model.spec, Race(key, "cpu", cpu=Pace(100, 10), gpu=Pace(50, 9)))
    assert chosen() == "cpu"
    monkeypatch.setenv("EDGE_GPU", "off")
    assert plan_here(model.file, model.spec, Options())[1].chosen == ""


def test_unmeasured_driver_is_skipped_under_a_memory_budget(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its compiler may take any amount. The budget is far above what the process of the tests has grown to."""
    keep_race(model.spec, Race(choose_adapter().key, "cpu", cpu=Pace(100, 10), gpu=Pace(50, 20)))

    def chosen(**options: Any) -> tuple[str, str]:
        engine, plan = plan_here(model.file, model.spec, Options.parse(max_kv_size=64, **options))
        return engine.NAME, plan.chosen

    assert chosen(memory="64GiB")[0] == "gpu"
    monkeypatch.setattr("edge.backends.tvm.gpu.hosts.wgpu.compiling_bytes", lambda *_: None)
    assert chosen()[0] == "gpu"
    name, said = chosen(memory="64GiB")
    assert name == "cpu"
    assert re.search(r"the CPU's, since on the GPU a first run may exceed --memory: .* --backend=gpu takes it", said)
    name, said = chosen(memory="64GiB", backend="gpu")
    assert name == "gpu"
    assert said.startswith("a first run may exceed --memory: what this GPU's driver takes")
    assert chosen(backend="gpu")[1] == ""


@pytest.mark.parametrize("together", [True, False])
def test_engines_are_loaded_together_only_if_both_fit(together: bool, caplog: pytest.LogCaptureFixture) -> None:
    model, most, open_now = open_golden("llama-gqa-tied").model, [0], [0]
    reference = engine_named("reference")

    def counted(*arguments: Any) -> Any:
        engine = reference.load(*arguments)
        open_now[0] += 1
        most[0] = max(most[0], open_now[0])
        end = engine.close

        def close() -> None:
            open_now[0] -= 1
            end()

        cast(Any, engine).close = close
        return engine

    plan = make_plan(model.spec, reference, Options(max_kv_size=64))
    plan = plan if together else replace(plan, limit=plan.bytes.total + plan.bytes.reserve)
    backend = cast(Backend, SimpleNamespace(NAME="reference", load=counted))
    paces = race(model.file, model.spec, [(backend, plan), (backend, plan)])
    assert all(0 < pace.seconds < 60 for pace in paces)
    assert (most, open_now) == ([1 + together], [0])

    def broken(*_: object) -> None:
        raise EngineError("the GPU was lost")

    failing = cast(Backend, SimpleNamespace(NAME="broken", load=broken))
    paces = race(model.file, model.spec, [(backend, plan), (failing, plan)])
    assert paces[0].seconds < paces[1].seconds == float("inf")
    assert "broken takes no part in the choice of an engine: the GPU was lost" in caplog.text


def test_no_driver_is_loaded_without_a_gpu(tmp_path: Path) -> None:
    assert seen_gpus(tmp_path) == ""
    node = tmp_path / "sys/class/drm/renderD128/device"
    node.mkdir(parents=True)
    (node / "vendor").write_text("0x8086\n")
    (node / "device").write_text("0x9a49\n")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/kgsl-3d0").touch()
    assert seen_gpus(tmp_path) == "0x8086 0x9a49, dev/kgsl-3d0"
    code = (
        "import os, sys, json, edge; os.environ['EDGE_GPU'] = 'off'; edge.load(sys.argv[1], max_kv_size=64).close();"
        "names = ('wgpu', 'pyopencl', 'cuda.bindings');"
        "print(json.dumps([name for name in sys.modules if name in names or '.gpu' in name]))"
    )
    assert run_child(code, PATH).output == []


def test_gpu_speed_is_not_predicted_before_a_run(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not from ceilings of the processor, nor are its joules; earlier runs do tell."""
    monkeypatch.setenv("EDGE_CACHE", str(tmp_path))  # other tests have run this model on this GPU
    monkeypatch.setenv("EDGE_HISTORY", "0")
    found = forecast(model, backend="gpu", max_kv_size=64)
    assert (found.prediction.decode, found.prediction.prefill_tok_s, found.prediction.basis) == ((), None, ())
    assert "how fast a GPU is shows in its first runs" in found.prediction.unknown[0]
    setting = Setting.of(model.spec, "gpu", found.plan.config)
    assert choose_adapter().key in setting.variant
    run = Run(2e9, setting, "golden", "full", 64, Phase(32, 0.5, 16.0), Phase(20, 2.0, 40.0))
    plan, profile = found.plan, find_profile("host")
    known = predict(model.spec, plan, profile, Wanted(32, (40,)), [run])
    assert known.decode[0].tok_s.value == pytest.approx(10, rel=0.01)
    assert known.decode[0].tok_s.source == "measured earlier (1 run)"
    assert known.decode[0].joules is None
    assert known.prefill_tok_s is not None
    assert known.prefill_tok_s.value == pytest.approx(64, rel=0.01)


# Tuning


def write(subject: Subject, values: dict[str, int | bool]) -> None:
    name = record_name(subject, "golden")
    write_record(
        Record(name, "host", subject, "golden", "a prompt", values, "tuned", 1.2, None, 5, 9.0, "2026-11-22", {})
    )


def test_records_belong_to_an_adapter(model: Model) -> None:
    subject = make_subject(model.spec, choose_adapter(), "f16")
    assert find_tuned(model.spec, "f16") is None
    write(replace(subject, isa="cuda cuda"), {"rows": 8})
    write(replace(subject, kv_dtype="int8"), {"rows": 8})
    assert find_record(model.spec, "f16") is None
    write(replace(subject, family="another driver"), {"rows": 1, "chunk": 64})
    tuned = find_tuned(model.spec, "f16")
    assert tuned is not None
    assert (tuned.values, tuned.chunk, tuned.threads) == ({"rows": 1}, 64, None)
    write(subject, {"rows": 4})
    tuned = engine_named("gpu").tuned(model.spec, "f16")
    assert tuned is not None
    assert tuned.values == {"rows": 4}


@pytest.mark.parametrize("values", [{"rows": 3}, {"attend": 1 << 20}, {"spins": 10}, {"chunk": 0}])
def test_untunable_values_never_reach_a_compiler(
    model: Model, caplog: pytest.LogCaptureFixture, values: dict[str, int | bool]
) -> None:
    write(make_subject(model.spec, choose_adapter(), "f16"), values)
    assert find_tuned(model.spec, "f16") is None
    assert "does not know" in caplog.text


def timed(model: Model, tokens: int, context: int) -> dict[str, Operator]:
    config = EngineConfig(64, 16, "f16", 1, tuning={"row_splits": 3, "split_from": 33})
    found = engine_named("gpu").operators(model.file, model.spec, config, tokens=tokens, context=context, passes=2)
    assert all(each.phase in PHASES and each.seconds >= 0 for each in found)
    return {each.name: each for each in by_name(found)}


def test_operators_are_those_of_a_pass(model: Model) -> None:
    spec = model.spec
    step, chunk = timed(model, 1, 20), timed(model, 24, 10)
    matrices = {"qkv", "output", "gate up", "down"}
    assert {name: each.calls for name, each in step.items() if name in matrices} == dict.fromkeys(matrices, spec.layers)
    assert step["attend step"].calls == spec.layers
    assert chunk["attend"].calls == 2 * spec.layers  # two chunks
    behind_many, row = timed(model, 1, 40), 2 * 2 * spec.kv_heads * spec.head_dim
    assert step["attend step"].bytes == spec.layers * row * 21
    assert behind_many["attend step part"].bytes == spec.layers * row * 41
    assert behind_many["attend step part"].flops == 41 * (step["attend step"].flops or 0) // 21
    assert behind_many["join"].bytes == spec.layers * spec.heads * 3 * 4 * (2 + spec.head_dim)
    products = sum(step[name].flops or 0 for name in matrices) // 2
    rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 2 * spec.ffn
    assert products == spec.layers * (spec.hidden * (rows + spec.heads * spec.head_dim) + spec.ffn * spec.hidden)
    assert [24 * (step[name].flops or 0) for name in matrices] == [chunk[name].flops for name in matrices]
    assert (chunk["down"].bytes, chunk["head"].bytes) == (2 * (step["down"].bytes or 0), step["head"].bytes)
