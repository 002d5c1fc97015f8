"""Conversations with a bundle on a GPU, and the same with edge's own GPU engine."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, model_of, refused
from conftest import CACHE, SOME_GPU
from ctypes_bundle import Bundle, BundleSession, open_bundle
from lora_files import write_adapter
from runtime_library import build, said_by

import edge
from edge.apps.enums import Engine, Role
from edge.apps.sections.adapter_file import export_adapter
from edge.backends.tvm.gpu.design import Tuning
from edge.backends.tvm.gpu.hosts import host_named
from edge.errors import EdgeError, EngineError
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


def variable(driver: ctypes.CDLL, name: str) -> Any:
    """A variable of a driver of tests: a flag, or a count."""
    flags = ("is_gpu", "refuses", "copies", "compiles", "hangs")
    kind: Any = ctypes.c_uint32 if name in flags else ctypes.c_double if name == "ahead" else ctypes.c_int64
    return kind.in_dll(driver, f"driver_{name}")


def check_lost_device(bundle: Bundle, error: str, later: int = 300, **options: Any) -> None:
    """Lost in a prompt, in an answer, and when a state is saved; another session goes on. later: submissions until it
    is lost in an answer."""
    runs, fails_at = variable(bundle.library, "runs"), variable(bundle.library, "fails_at")
    with bundle.session(engine=Engine.CPU, **GREEDY) as cpu:
        expected = cpu.answer(PROMPT, Role.RAW)
    for more in (3, later):
        with bundle.session(engine=Engine.GPU, **GREEDY, **options) as gpu:
            fails_at.value = runs.value + more
            refused(EngineError, rf"the GPU has failed \({error}\): end the session", gpu.answer, PROMPT, Role.RAW)
            refused(EngineError, "the GPU has failed", gpu.save)
            fails_at.value = -1
            refused(EngineError, "the GPU has failed", gpu.rewind)
    with bundle.session(engine=Engine.GPU, **GREEDY, **options) as gpu:
        assert gpu.answer(PROMPT, Role.RAW) == expected


@contextmanager
def cancelled_session(bundle: Bundle, **options: Any) -> Iterator[tuple[BundleSession, ctypes.c_int64, ctypes.c_int64]]:
    """A session on the GPU, the driver's count of submissions, and the one at which the driver cancels it."""
    runs, cancels_at = variable(bundle.library, "runs"), variable(bundle.library, "cancels_at")
    with bundle.session(engine=Engine.GPU, **GREEDY, **options) as gpu:
        ctypes.c_void_p.in_dll(bundle.library, "driver_session").value = gpu.handle.value
        yield gpu, runs, cancels_at


def answers_in_c(
    program: Path, model: Path, engine: Engine, kept: str | Path, count: int,
    environment: Mapping[str, str] = os.environ,
) -> str:  # fmt: skip
    """The output of gpu_answers.c: three turns, saved states and evictions on this engine as on the CPU. kept: what the
    engine reads or writes."""
    surroundings = {**environment, "ASAN_OPTIONS": "detect_leaks=0"}  # drivers keep memory until the process ends
    return said_by(program, model, int(engine), kept, count, env=surroundings)


def peak_in_c(
    bundle: Path, engine: Engine, kept: str | Path, count: int, environment: Mapping[str, str] = os.environ
) -> int:
    """Bytes of a process without Python. The session of the CPU beside that of the engine is small."""
    flags = (f"-Wl,-rpath,{bundle}", "-Dmain=measured")
    program = build(["gpu_answers.c", "peak.c", bundle / "libedge.so"], flags)
    return int(answers_in_c(program, bundle / "model.edge", engine, kept, count, environment).split()[-1])


def check_adapters(folder: Path, library: Path | None = None, **options: Any) -> None:
    """Answers with adapters are those of the GPU engine, one after the other in one session, with evictions: a part of
    an adapter, another, two together, none. A refused one leaves none. folder: an empty one."""
    whole, other = (str(write_adapter(folder / f"{rank}.gguf", model_of(MODEL), rank, seed=rank)) for rank in (20, 7))
    first, rank, chosen = f"{whole}:0.5", {"lora_rank": 32}, ROWS | options
    bundle, drawn = bundle_of(MODEL, gpu=True, **rank, **chosen), {"temperature": 1.0, "seed": 7}

    def packed(lora: str, target: Path = bundle) -> bytes:
        export_adapter(model_of(MODEL), lora, target, folder / "a.edge", force=True)
        return (folder / "a.edge").read_bytes()

    with (
        edge.load(model_of(MODEL), backend="gpu", speculate="off", lora=f"{first},{other}", **chosen) as python,
        open_bundle(bundle, library) as opened,
        opened.session(engine=Engine.GPU, cache=kernels()) as exported,
    ):
        texts = []
        for lora in (None, first, other, f"{other},{first}", None, first):
            python.set_lora(lora)
            exported.set_adapter(packed(lora) if lora else None)
            texts.append(ask_both(python, exported, 48, **drawn))
        exported.set_adapter(packed(whole), 0.5)
        texts.append(ask_both(python, exported, 48, **drawn))
        assert texts[0] == texts[4]
        assert texts[1] == texts[5] == texts[6]
        assert len({*texts[:4]}) == 4
        assert (exported.use()["evicted"] > 20, exported.use()["lora"]) == (True, 0)
        python.set_lora(None)
        for data, scale, says in (
            (packed(whole)[:-40], 1.0, "damaged or cut short"), (packed(whole), 1e6, "too large with this scale"),
            (packed(whole, bundle_of(MODEL, **rank, **chosen)), 1.0, "not for the GPU of this bundle"),
        ):  # fmt: skip
            with pytest.raises(EdgeError, match=says):
                exported.set_adapter(data, scale)
            assert ask_both(python, exported, 48, **drawn) == texts[0]
