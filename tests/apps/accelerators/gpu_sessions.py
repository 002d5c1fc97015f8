"""Conversations with a bundle on a GPU, and the same with edge's own GPU engine."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, model_of
from conftest import CACHE, SOME_GPU
from ctypes_bundle import Bundle, BundleSession, open_bundle
from runtime_library import build

import edge
from edge.apps.enums import Engine, Finish, Role
from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.hosts import host_named
from edge.errors import EngineError
from edge.run.session import Session

MODEL = "llama-gqa-tied"
ROWS = {"max_kv_size": 96, "prefill_step_size": 16}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": 1, "max_tokens": 40}
PROMPT = "The quick brown fox jumps over the lazy dog, and what it finds behind it is this:"


def stand_in(patch: pytest.MonkeyPatch, *hosts: str) -> None:
    """A CPU of one of these hosts stands in for a GPU, and Python's GPU engine divides its work as for an unknown one,
    for which bundles are made."""
    patch.setenv("POCL_WORK_GROUP_METHOD", "loops")  # as Python's host sets it
    found = {name: host_named(name).adapters() for name in hosts}
    name = next((name for name in hosts if found[name]), None)
    if name is None:
        pytest.skip(f"no adapter through {' or '.join(hosts)}")
    patch.setenv("EDGE_GPU", SOME_GPU if name == "wgpu" else found[name][0].place)
    patch.setattr(Tuning, "of", lambda _kind: Tuning())


def kernels() -> str:
    """The folder of what drivers compile, which tests share."""
    folder = CACHE / "opencl"
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


@contextmanager
def sessions(
    name: str, library: Path | None = None, folder: Path | None = None, **options: Any
) -> Iterator[tuple[Session, BundleSession]]:
    """library and folder: instead of the bundle's own."""
    with (
        edge.load(model_of(name), backend="gpu", speculate="off", **options) as python,
        open_bundle(folder or bundle_of(name, gpu=True, **options), library) as bundle,
        bundle.session(engine=Engine.GPU, cache=kernels()) as exported,
    ):
        yield python, exported


def ask_both(
    python: Session, exported: BundleSession, tokens: int, prompt: str = PROMPT, *, follow_up: bool = False,
    rewind: bool = True, **sampling: Any,
) -> str:  # fmt: skip
    """The answer, which is that of both. rewind: the exported session, behind it."""
    exported.set(max_tokens=tokens, ignore_eos=1, **sampling)
    _, text, _ = exported.answer(prompt, Role.RAW)
    how: dict[str, Any] = {"raw": True, "follow_up": follow_up, "sampling": python.model.sampling(**sampling)}
    assert text == python.generate(prompt, max_tokens=tokens, ignore_eos=True, **how)
    use = exported.use()
    assert (use["rows"], use["capacity"]) == (python.engine.kv.length, python.engine.kv.capacity)
    if rewind:
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
    """A prompt that is cancelled within a chunk leaves the session as if it had not begun."""
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


def answers_in_c(
    sources: Sequence[Path], flags: Sequence[str], model: Path, engine: Engine, kept: str | Path, count: int,
    environment: Mapping[str, str] = os.environ,
) -> str:  # fmt: skip
    """The output of a program in C: three turns, saved states and evictions on this engine as on the CPU. kept: what
    the engine reads or writes."""
    built = build([Path(__file__).parents[1] / "runtime" / "gpu_answers.c", *sources], flags)
    done = subprocess.run(
        [built, model, str(int(engine)), kept, str(count)], capture_output=True, text=True, timeout=900, check=False,
        env={**environment, "ASAN_OPTIONS": "detect_leaks=0"},  # drivers keep memory until the process ends
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    return done.stdout


def check_peak(name: str, folder: Path, environment: Mapping[str, str]) -> None:
    """Of a process without Python: three turns on the GPU, with nothing compiled before, then with all that edge and
    the driver keep. The session of the CPU beside it is small."""
    bundle, measured = bundle_of(name, gpu=True, **ROWS), Path(__file__).parents[1] / "runtime" / "peak.c"
    peak = json.loads((bundle / "manifest.json").read_text())["gpu"]["peak"]
    kept, compiled = folder / "kept", folder / "compiled"
    for each in (kept, compiled):
        each.mkdir()
    drivers = dict.fromkeys(("MESA_SHADER_CACHE_DIR", "POCL_CACHE_DIR"), str(compiled))
    flags = (f"-Wl,-rpath,{bundle}", "-Dmain=measured")
    for _ in range(2):
        parts = [measured, bundle / "libedge.so"]
        said = answers_in_c(parts, flags, bundle / "model.edge", Engine.GPU, kept, 8, {**environment, **drivers})
        assert 8 << 20 < int(said.split()[-1]) < peak
    assert any(compiled.iterdir())  # or else the first run has compiled nothing
