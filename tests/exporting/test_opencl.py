"""The pass of exported models on a GPU, by OpenCL: the same answers as edge's own GPU engine, and as on the CPU.

pocl, an OpenCL driver for CPUs, stands in for a GPU. Python's engine is told to divide its work as for an unknown
GPU, for which bundles are made: then both run the same kernels.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, bundle_sources, model_of
from conftest import CACHE
from ctypes_bundle import BundleSession, open_bundle
from runtime_library import RUNTIME, build

import edge
from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.hosts import host_named
from edge.errors import EdgeError, InputError, UnsupportedError
from edge.exporting.bundle import export
from edge.exporting.enums import Engine, Role
from edge.run.session import Session

pytest.importorskip("tvm")

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 96, "prefill_step_size": 16}
PROMPT = "The quick brown fox jumps over the lazy dog, and what it finds behind it is this:"
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1")


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCL_WORK_GROUP_METHOD", "loops")  # as Python's host sets it
    adapters = host_named("opencl").adapters()
    if not adapters:
        pytest.skip("no OpenCL driver")
    monkeypatch.setenv("EDGE_GPU", adapters[0].place)
    monkeypatch.setattr(Tuning, "of", lambda _kind: Tuning())


def kernels() -> str:
    """The folder of what the driver compiles, which tests share."""
    folder = CACHE / "opencl"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


@contextmanager
def sessions(name: str, **options: Any) -> Iterator[tuple[Session, BundleSession]]:
    with (
        edge.load(model_of(name), backend="gpu", speculate="off", **options) as python,
        open_bundle(bundle_of(name, gpu=True, **options)) as bundle,
        bundle.session(engine=Engine.GPU, cache=kernels()) as exported,
    ):
        yield python, exported


def ask_both(python: Session, exported: BundleSession, tokens: int, prompt: str = PROMPT, **sampling: Any) -> None:
    exported.set(max_tokens=tokens, ignore_eos=1, **sampling)
    _, text, _ = exported.answer(prompt, Role.RAW)
    expected = python.generate(
        prompt, max_tokens=tokens, ignore_eos=True, raw=True, sampling=python.model.sampling(**sampling)
    )
    assert text == expected
    use = exported.use()
    assert (use["rows"], use["capacity"]) == (python.engine.kv.length, python.engine.kv.capacity)
    exported.rewind()


def test_answers_are_those_of_the_gpu_engine_evictions_included() -> None:
    with sessions(MODEL, **ROWS) as (python, exported):
        ask_both(python, exported, 150, temperature=0.0)
        ask_both(python, exported, 150, temperature=1.0, seed=7)
        use = exported.use()
        assert use["engine"] == Engine.GPU
        assert use["gpu"]
        assert use["evicted"] > 100
        manifest = json.loads((bundle_of(MODEL, gpu=True, **ROWS) / "manifest.json").read_text())
        assert use["gpu_bytes"] == sum(manifest["gpu"]["bytes"].values()) < manifest["gpu"]["peak"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (MODEL, {"kv_policy": "full", "max_kv_size": 512}),
        (MODEL, {"kv_policy": "window"}),
        (MODEL, {"kv_dtype": "int8"}),
        (MODEL, {"kv_dtype": "f32"}),
        ("gemma3", {}),  # rings
        ("gemma4", {}),  # rings whose heads differ, in an arena of their own, and a table of per-layer embeddings
        ("gemma2", {"kv_dtype": "int8"}),
        ("llama-window", {}),
        ("llama-rope-scaled", {}),
        ("gpt2", {}),  # learned positions
        ("phi3", {}),
        ("qwen3moe", {}),
    ],
)
def test_models_policies_and_types_of_rows(name: str, options: dict[str, Any]) -> None:
    with sessions(name, **ROWS | options) as (python, exported):
        tokens = 60 if name == "gpt2" else 200
        ask_both(python, exported, tokens, temperature=0.0)
        ask_both(python, exported, tokens, temperature=1.0, seed=7)
        if name != "gpt2":
            ask_both(python, exported, 20, 2 * PROMPT, temperature=0.0)


@pytest.mark.exhaustive
def test_states_go_from_one_engine_to_the_other() -> None:
    folder = bundle_of(MODEL, gpu=True, **ROWS)
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": 1, "max_tokens": 60}
    with (
        open_bundle(folder) as bundle,
        bundle.session(engine=Engine.GPU, cache=kernels(), **greedy) as gpu,
        bundle.session(engine=Engine.AUTO, **greedy) as cpu,
    ):
        assert cpu.use()["engine"] == Engine.CPU
        assert cpu.use()["gpu"] == ""
        for first, other in ((gpu, cpu), (cpu, gpu)):
            first.answer(PROMPT, Role.RAW)
            other.load(first.save())
            assert other.save() == first.save()
            assert first.answer(PROMPT, Role.RAW) == other.answer(PROMPT, Role.RAW)


@pytest.mark.exhaustive
def test_what_the_driver_compiles_is_kept_and_checked(tmp_path: Path) -> None:
    folder = bundle_of(MODEL, gpu=True, **ROWS)
    with open_bundle(folder) as bundle:
        bundle.session(engine=Engine.GPU, cache=str(tmp_path)).end()
        (kept,) = tmp_path.iterdir()
        first = kept.read_bytes()
        bundle.session(engine=Engine.GPU, cache=str(tmp_path)).end()
        assert kept.read_bytes() == first
        kept.write_bytes(first[:-1] + b"?")
        bundle.session(engine=Engine.GPU, cache=str(tmp_path)).end()
        assert [path.name for path in tmp_path.iterdir()] == [kept.name]
        assert kept.stat().st_size > 64


def test_a_device_that_is_missing_is_said_in_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from ctypes_bundle import open_bundle\n"
        "bundle = open_bundle(sys.argv[1])\n"
        "try:\n    bundle.session(engine=2)\nexcept Exception as error:\n    print(type(error).__name__, error)\n"
        "bundle.session(engine=0).end()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, bundle_of(MODEL, gpu=True, **ROWS), str(Path(__file__).parent)],
        env=os.environ | {"OCL_ICD_VENDORS": str(tmp_path)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "UnsupportedError OpenCL has no device here: set engine to cpu or auto\n"


def test_bundles_without_programs_say_so() -> None:
    with open_bundle(bundle_of(MODEL, **ROWS)) as bundle:
        with pytest.raises(UnsupportedError, match="export it with --gpu"):
            bundle.session(engine=Engine.GPU)
        with pytest.raises(InputError, match="3 is not an edge_engine"):
            bundle.session(engine=3)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        (MODEL, {"device": "iphone-16"}, "for linux, android, web, not for ios"),
        (MODEL, {"kv_policy": "h2o"}, "no KV policies that look at attention: choose"),
        (MODEL, {"kv_dtype": "int4"}, "no int4 KV rows"),
        (MODEL, {"lora_rank": 8}, "no LoRA adapters"),
        ("qwen35", {}, "no layers with a recurrent state"),
    ],
)
def test_what_the_pass_lacks_is_refused(name: str, options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(EdgeError, match=says):
        export(model_of(name), tmp_path / "out", **{"gpu": True} | options)
    assert not (tmp_path / "out").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, "gemma3"])
def test_sanitizers_find_nothing(name: str) -> None:
    model, parts = bundle_sources(name, gpu=True, **ROWS)
    sources = [*sorted(RUNTIME.glob("*.c")), *sorted((RUNTIME / "gpu").glob("*.c"))]
    program = Path(__file__).parent / "runtime" / "gpu_answers.c"
    built = build([program, *sources, *parts], (f"-I{RUNTIME / 'gpu'}", "-ldl", *SANITIZED))
    done = subprocess.run(
        [built, model, kernels(), "100"], capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},  # drivers keep memory until the process ends
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
