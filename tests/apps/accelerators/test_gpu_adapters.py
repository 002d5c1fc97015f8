"""LoRA adapters in sessions of the C library on a GPU: the answers of edge's own GPU engine with the same adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, model_of
from ctypes_bundle import BundleSession, open_bundle
from gpu_sessions import MODEL, PROMPT, ROWS, ask_both, kernels, stand_in
from lora_files import write_adapter
from test_webgpu import driver_library

import edge
from edge.apps.enums import Engine, Role
from edge.apps.sections.adapter_file import export_adapter
from edge.errors import EdgeError, InputError, UnsupportedError

pytestmark = pytest.mark.exhaustive

RANK = 32
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7}


@pytest.fixture
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a host whose CPU stands in for a GPU, with the division of work that bundles have."""
    name = str(getattr(request, "param", "opencl"))
    stand_in(monkeypatch, name)
    return name


@pytest.mark.parametrize("host", ["opencl", "wgpu"], indirect=True)
def test_answers_with_adapters_are_those_of_the_gpu_engine(host: str, tmp_path: Path) -> None:
    """One after the other, in one session, with evictions: a part of an adapter, another, two together, none. By OpenCL
    with int4 rows, which are otherwise tested exhaustively."""
    options = ROWS | {"kv_dtype": "int4" if host == "opencl" else "f16"}
    whole, other = (str(adapter_of(tmp_path, *each)) for each in ((1, 20), (2, 7)))
    first = f"{whole}:0.5"
    folder = bundle_of(MODEL, gpu=True, lora_rank=RANK, **options)
    library, texts = driver_library(lora_rank=RANK) if host == "wgpu" else None, list[str]()
    with (
        edge.load(model_of(MODEL), backend="gpu", speculate="off", lora=f"{first},{other}", **options) as python,
        open_bundle(folder, library) as bundle,
        bundle.session(engine=Engine.GPU, cache=kernels()) as exported,
    ):
        for lora in (None, first, other, f"{other},{first}", None, first):
            python.set_lora(lora)
            exported.set_adapter(packed(lora, folder) if lora else None)
            texts.append(ask_both(python, exported, 48, **DRAWN))
        exported.set_adapter(packed(whole, folder), 0.5)
        texts.append(ask_both(python, exported, 48, **DRAWN))
        use, manifest = exported.use(), json.loads((folder / "manifest.json").read_text())
    assert texts[0] == texts[4]
    assert texts[1] == texts[5] == texts[6]
    assert len({*texts[:4]}) == 4
    counted = manifest["gpu"]["bytes"]
    assert (use["evicted"] > 20, use["lora"], counted["lora"] > 0) == (True, 0, True)
    if host == "opencl":  # which has no buffers of its own
        assert use["gpu_bytes"] == sum(counted.values())


def test_refused_adapter_leaves_none_on_the_gpu(host: str, tmp_path: Path) -> None:
    """The same code, whatever the host."""
    options = ROWS | {"kv_dtype": "int4"}
    folder, cpus = bundle_of(MODEL, gpu=True, lora_rank=RANK, **options), bundle_of(MODEL, lora_rank=RANK, **options)
    adapter = adapter_of(tmp_path, 1, 20)
    data, of_cpu = packed(adapter, folder), packed(adapter, cpus)
    with open_bundle(folder) as bundle, bundle.session(engine=Engine.GPU, cache=kernels()) as gpu:
        plain = _answer(gpu)
        for damaged, error, says in (
            (data[:-40], EdgeError, "damaged or cut short"),
            (data[: len(data) // 2], EdgeError, "damaged or cut short"),
            (data[:-9] + b"?" + data[-8:], EdgeError, "damaged or cut short"),
            (of_cpu, UnsupportedError, "not for the GPU of this bundle: make it for the bundle"),
        ):
            gpu.set_adapter(data)
            with pytest.raises(error, match=says):
                gpu.set_adapter(damaged)
            assert _answer(gpu) == plain
        with pytest.raises(InputError, match="too large with this scale"):
            gpu.set_adapter(data, 1e6)
        assert _answer(gpu) == plain
        gpu.set_adapter(data)
        adapted = _answer(gpu)
        state = gpu.save()
        with bundle.session(engine=Engine.CPU) as cpu:  # of the same file its own part
            assert _answer(cpu) == plain
            cpu.set_adapter(data)
            assert _answer(cpu) == adapted
            cpu.rewind()
            cpu.load(state)
            gpu.load(state)
            assert cpu.answer("And?", Role.RAW)[1] == gpu.answer("And?", Role.RAW)[1]
    with open_bundle(cpus) as bundle, bundle.session() as cpu:
        cpu.set_adapter(data)
        assert _answer(cpu) == adapted


def adapter_of(folder: Path, seed: int, rank: int) -> Path:
    return write_adapter(folder / f"{seed}.gguf", model_of(MODEL), rank, seed=seed)


def packed(lora: str | Path, bundle: Path) -> bytes:
    path = bundle / "a.edge"
    export_adapter(model_of(MODEL), lora, bundle, path, force=True)
    return path.read_bytes()


def _answer(session: BundleSession) -> str:
    session.rewind()
    session.set(temperature=0.0, ignore_eos=1, max_tokens=40)
    return session.answer(PROMPT, Role.RAW)[1]
