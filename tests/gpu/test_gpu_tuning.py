"""Tuning of the GPU engine, and the times of its dispatches, on Mesa's lavapipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GOLDEN, SOME_GPU, on_gpu

from edge.backends import engine_named
from edge.backends.base import PHASES, EngineConfig, Operator
from edge.backends.operators import by_name
from edge.backends.tvm.gpu.hosts import choose_adapter
from edge.backends.tvm.gpu.tuning import find_record, find_tuned, make_subject
from edge.devices.records import Record, Subject, record_name, write_record
from edge.model.model import Model, open_model


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with on_gpu(SOME_GPU):
        yield open_model(GOLDEN / "llama-gqa-tied.gguf")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGE_TUNING", str(tmp_path))


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
    config = EngineConfig(64, 16, "f16", 1)
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
    products = sum(step[name].flops or 0 for name in matrices) // 2
    rows = (spec.heads + 2 * spec.kv_heads) * spec.head_dim + 2 * spec.ffn
    assert products == spec.layers * (spec.hidden * (rows + spec.heads * spec.head_dim) + spec.ffn * spec.hidden)
    assert [24 * (step[name].flops or 0) for name in matrices] == [chunk[name].flops for name in matrices]
    assert (chunk["down"].bytes, chunk["head"].bytes) == (2 * (step["down"].bytes or 0), step["head"].bytes)
