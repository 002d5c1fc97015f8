"""Conversations with a bundle on a GPU, and the same with edge's own GPU engine."""

from __future__ import annotations

import ctypes
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, model_of
from conftest import CACHE
from ctypes_bundle import Bundle, BundleSession, open_bundle
from runtime_library import build

import edge
from edge.apps.enums import Engine, Finish, Role
from edge.errors import EngineError
from edge.run.session import Session

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 96, "prefill_step_size": 16}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": 1, "max_tokens": 40}
PROMPT = "The quick brown fox jumps over the lazy dog, and what it finds behind it is this:"


def kernels() -> str:
    """The folder of what drivers compile, which tests share."""
    folder = CACHE / "opencl"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


@contextmanager
def sessions(name: str, library: Path | None = None, **options: Any) -> Iterator[tuple[Session, BundleSession]]:
    """library: instead of the bundle's own."""
    with (
        edge.load(model_of(name), backend="gpu", speculate="off", **options) as python,
        open_bundle(bundle_of(name, gpu=True, **options), library) as bundle,
        bundle.session(engine=Engine.GPU, cache=kernels()) as exported,
    ):
        yield python, exported


def ask_both(python: Session, exported: BundleSession, tokens: int, prompt: str = PROMPT, **sampling: Any) -> str:
    """The answer, which is that of both."""
    exported.set(max_tokens=tokens, ignore_eos=1, **sampling)
    _, text, _ = exported.answer(prompt, Role.RAW)
    expected = python.generate(
        prompt, max_tokens=tokens, ignore_eos=True, raw=True, sampling=python.model.sampling(**sampling)
    )
    assert text == expected
    use = exported.use()
    assert (use["rows"], use["capacity"]) == (python.engine.kv.length, python.engine.kv.capacity)
    exported.rewind()
    return text


def check_follow_up(gpu: BundleSession, cpu: BundleSession) -> None:
    """A conversation goes on as on the CPU, and its state on the other engine."""
    for _ in range(3):
        assert gpu.answer(PROMPT, Role.RAW) == cpu.answer(PROMPT, Role.RAW)
    cpu.load(gpu.save())
    gpu.load(cpu.save())
    assert gpu.answer("And?", Role.RAW) == cpu.answer("And?", Role.RAW)
    assert gpu.use()["evicted"] > 20


def check_lost_device(bundle: Bundle, driver: ctypes.CDLL, error: str, later: int = 300, **options: Any) -> None:
    """Lost in a prompt, in an answer, and when a state is saved; another session goes on. driver: its variables. later:
    submissions until it is lost in an answer."""
    runs, fails_at = (ctypes.c_int64.in_dll(driver, f"driver_{name}") for name in ("runs", "fails_at"))
    with bundle.session(engine=Engine.CPU, **GREEDY) as cpu:
        expected = cpu.answer(PROMPT, Role.RAW)
    for more in (3, later):
        with bundle.session(engine=Engine.GPU, **GREEDY, **options) as gpu:
            fails_at.value = runs.value + more
            with pytest.raises(EngineError, match=rf"the GPU has failed \({error}\): end the session"):
                gpu.answer(PROMPT, Role.RAW)
            with pytest.raises(EngineError, match="the GPU has failed"):
                gpu.save()
            fails_at.value = -1
            with pytest.raises(EngineError, match="the GPU has failed"):
                gpu.rewind()
    with bundle.session(engine=Engine.GPU, **GREEDY, **options) as gpu:
        assert gpu.answer(PROMPT, Role.RAW) == expected


@contextmanager
def cancelled_session(
    bundle: Bundle, driver: ctypes.CDLL, **options: Any
) -> Iterator[tuple[BundleSession, ctypes.c_int64, ctypes.c_int64]]:
    """A session on the GPU, the driver's count of submissions, and the one at which the driver cancels it."""
    runs, cancels_at = (ctypes.c_int64.in_dll(driver, f"driver_{name}") for name in ("runs", "cancels_at"))
    with bundle.session(engine=Engine.GPU, **GREEDY, **options) as gpu:
        ctypes.c_void_p.in_dll(driver, "driver_session").value = gpu.handle.value
        yield gpu, runs, cancels_at


def check_cancelled_prompt(bundle: Bundle, driver: ctypes.CDLL, **options: Any) -> None:
    """Within a chunk; and it goes on as if it had not begun."""
    with cancelled_session(bundle, driver, **options) as (gpu, runs, cancels_at):
        cancels_at.value = runs.value  # the first one
        assert gpu.answer(PROMPT, Role.RAW) == ([], "", Finish.INTERRUPTED)
        assert runs.value == cancels_at.value + 1
        assert gpu.use()["rows"] == 0
        cancels_at.value = -1
        gpu.rewind()
        answer = gpu.answer(PROMPT, Role.RAW)
        with bundle.session(engine=Engine.CPU, **GREEDY) as cpu:
            assert answer == cpu.answer(PROMPT, Role.RAW)


def check_peak(name: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Of a process without Python: three turns on the GPU, with nothing compiled before, then with all that edge and
    the driver keep. The session of the CPU beside it is small."""
    bundle, sources = bundle_of(name, gpu=True, **ROWS), Path(__file__).parent / "runtime"
    peak = json.loads((bundle / "manifest.json").read_text())["gpu"]["peak"]
    program = build(
        [sources / "gpu_answers.c", sources / "peak.c", bundle / "libedge.so"],
        (f"-Wl,-rpath,{bundle}", "-Dmain=measured"),
    )
    kept, compiled = folder / "kept", folder / "compiled"
    for each in (kept, compiled):
        each.mkdir()
    drivers = dict.fromkeys(("MESA_SHADER_CACHE_DIR", "POCL_CACHE_DIR"), str(compiled))
    for _ in range(2):
        done = subprocess.run(
            [program, bundle / "model.edge", str(int(Engine.GPU)), kept, "8"], capture_output=True, text=True,
            timeout=900, check=True, env={**environment, **drivers},
        )  # fmt: skip
        assert 8 << 20 < int(done.stdout.split()[-1]) < peak
    assert any(compiled.iterdir())  # or else the first run has compiled nothing
