"""Engines allocate the arrays that plans have counted, for every core. Nothing is compiled, and no pass runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN

from edge.backends.base import Backend, EngineConfig
from edge.backends.counts import Footprint
from edge.backends.tvm import ENGINE as CPU
from edge.backends.tvm import engine as cpu_engine
from edge.backends.tvm import memory as memory_module
from edge.backends.tvm import passes as passes_module
from edge.backends.tvm.gpu import ENGINE as GPU
from edge.backends.tvm.gpu import engine as gpu_engine
from edge.backends.tvm.gpu.design import Design
from edge.backends.tvm.gpu.export import any_gpu
from edge.backends.tvm.gpu.memory import DeviceMemory
from edge.backends.tvm.gpu.program import Program
from edge.backends.tvm.packing.cores import KINDS
from edge.errors import UnsupportedError
from edge.model.cores import Features, NextToken
from edge.model.model import Model, open_model
from edge.model.tensors import find_network

MODELS = (
    "llama-gqa-tied", "gemma3", "gemma4", "gpt-oss", "qwen35", "falcon-h1", "lfm2", "qwen3moe", "gemma4moe", "mamba",
    "kimi-linear",
    "encoders/bert",
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int4, split": {"kv_dtype": "int4", "capacity": 1024},
    "int8, small": {"capacity": 33, "chunk": 3, "kv_dtype": "int8"},
    "observed": {"observes": True, "per_head": True, "uneven": True, "logits_rows": 5},
    "sequences": {"sequences": 3, "reads": 64, "capacity": 256},
    "drafts": {"drafts": 5, "taps": (0,)},
    "adapters": {"lora_rank": 8, "loras": 2},
}


def config_of(name: str) -> EngineConfig:
    return EngineConfig(**{"capacity": 96, "chunk": 16, "kv_dtype": "f16", "threads": 2} | CONFIGS[name])


def open_each() -> Iterator[Model]:
    return (open_model(GOLDEN / f"{name}.gguf") for name in MODELS)


def counted(backend: Backend, config: EngineConfig) -> Iterator[tuple[Model, Footprint]]:
    """The models that the engine runs so, and their footprints."""
    for model in open_each():
        with suppress(UnsupportedError):
            yield model, backend.footprint(model.spec, config)


def test_the_models_have_all_cores() -> None:
    found = {type(core) for model in open_each() for core in find_network(model.spec).cores}
    assert found == KINDS.keys() - {NextToken, Features}  # of drafters, which tests/run runs


def test_layers_of_encoder_share_rows() -> None:
    """No layer's rows are read in the next one."""
    spec = open_model(GOLDEN / "encoders" / "bert.gguf").spec
    kv = CPU.memory(spec, config_of("plain")).kv
    assert spec.layers == 2
    assert sum(arena.rows for arena in kv.arenas) == spec.kv_heads * 96
    assert set(kv.regions()[0].starts.tolist()) == {0, 96}


class Threads:
    """Workers that run nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def run(self, **_: int) -> None: ...

    def close(self) -> None: ...


@contextmanager
def counting(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The bytes of each array that is allocated."""
    found, allocate = list[int](), memory_module.aligned_zeros

    def noted(count: int, dtype: str) -> Any:
        array = allocate(count, dtype)
        found.append(array.nbytes)
        return array

    for module in (memory_module, passes_module):
        patch.setattr(module, "aligned_zeros", noted)
    yield found


@pytest.mark.parametrize("name", CONFIGS)
def test_cpu_engines_allocate_as_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_engine, "compiled", lambda *_, **__: None)
    monkeypatch.setattr(passes_module, "Workers", Threads)
    monkeypatch.setattr(cpu_engine, "choose_normals", lambda *_: None)
    config = config_of(name)
    for model, footprint in counted(CPU, config):
        planned = CPU.memory(model.spec, config)
        with counting(monkeypatch) as allocated:
            engine = cpu_engine.NativeEngine(model.file, model.spec, config)
        arrays = dict(engine.passes.arrays)
        of_layout = [arrays.pop(each).nbytes for each in ("table", "times")]
        assert {each: (array.size, array.dtype) for each, array in arrays.items()} == {
            each: (array.size, np.dtype(array.dtype)) for each, array in planned.arrays.items()
        }, model.spec.name
        spare = sum(array.spare * np.dtype(array.dtype).itemsize for array in planned.arrays.values())
        assert sum(allocated) == sum(array.nbytes for array in planned.arrays.values()) + spare + sum(of_layout)
        held = sum(engine.sequence(number).kv.nbytes for number in range(config.sequences))
        assert held == footprint.kv
        engine.close()


class FakeDevice:
    """A device that has nothing but sizes."""

    adapter = any_gpu("wgsl")

    def __init__(self) -> None:
        self.created: list[int] = []

    def create(self, size: int) -> object:
        self.created.append(size)
        return SimpleNamespace(size=size)

    def write(self, buffer: Any, offset: int, data: Any) -> None:
        assert offset + data.nbytes <= buffer.size

    def record(self, *_: object) -> None: ...

    def prepare(self, *_: object) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"drafts"}))
def test_gpu_engines_allocate_as_planned(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, device = config_of(name), FakeDevice()
    monkeypatch.setattr(gpu_engine, "choose_adapter", lambda _: FakeDevice.adapter)
    monkeypatch.setattr(gpu_engine, "open_device", lambda _: device)
    monkeypatch.setattr(gpu_engine, "program_of", lambda *_: Program("wgsl", {}, {}, {"picked": ()}))
    monkeypatch.setattr(gpu_engine.GPUEngine, "_warm_up", lambda _: None)
    for model, footprint in counted(GPU, config):
        device.created.clear()
        planned, design = DeviceMemory.of(model.spec, config), Design.of(model.file, model.spec, config, device.adapter)
        sizes = {each: buffer.nbytes for each, buffer in planned.buffers.items()}
        engine = gpu_engine.GPUEngine(model.file, model.spec, config)
        others = design.weights.buffers | design.adapters.buffers(design.weights)
        found = {each: buffer.size for each, buffer in cast(Any, engine).passes.buffers.items() if each not in others}
        assert found.pop("tables") <= sizes.pop("tables"), model.spec.name  # fewer values may be rotated
        assert found == sizes, model.spec.name
        assert len(device.created) == len(engine.passes.buffers)
        assert sum(others.values()) <= footprint.weights + footprint.lora
        engine.close()
