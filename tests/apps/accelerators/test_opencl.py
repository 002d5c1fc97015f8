"""The pass of exported models on a GPU, by OpenCL: the same answers as edge's own GPU engine, and as on the CPU.

pocl, an OpenCL driver for CPUs, stands in for a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import shutil
import struct
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, bundle_sources, model_of
from ctypes_bundle import open_bundle
from gpu_sessions import (
    MODEL,
    PROMPT,
    ROWS,
    answers_in_c,
    ask_both,
    check_cancelled_prompt,
    check_lost_device,
    kernels,
    sessions,
    stand_in,
)
from runtime_library import C_FILES, CHECKED, RUNTIME, build

from edge.apps.enums import Engine, Role
from edge.errors import InputError, UnsupportedError


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "opencl")


@pytest.mark.wing("OpenCL")
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
@pytest.mark.parametrize(("name", "options"), [
    (MODEL, {"kv_policy": "full", "max_kv_size": 512}),
    (MODEL, {"kv_policy": "window"}),
    (MODEL, {"kv_dtype": "int8"}),
    (MODEL, {"kv_dtype": "f32"}),
    (MODEL, {"kv_dtype": "int4"}),
    ("gemma3", {"kv_dtype": "int4"}),  # whose pairs of RoPE are halves
    ("gemma4", {"kv_dtype": "int4"}),
    ("gemma3", {}),  # rings
    ("gemma4", {}),  # rings whose heads differ, in an arena of their own, and a table of per-layer embeddings
    ("gemma2", {"kv_dtype": "int8"}),
    ("llama-window", {}),
    ("llama-rope-scaled", {}),
    ("gpt2", {}),  # learned positions
    ("phi3", {}),
    ("qwen3moe", {}),
    ("qwen35", {"kv_dtype": "int8"}),  # a fixed state
    ("falcon-mamba", {}),  # which has no rows
])  # fmt: skip
def test_each_model_policy_and_row_type_answers_as_the_gpu_engine(name: str, options: dict[str, Any]) -> None:
    with sessions(name, **ROWS | options) as (python, exported):
        tokens = 60 if name == "gpt2" else 200
        ask_both(python, exported, tokens, temperature=0.0)
        ask_both(python, exported, tokens, temperature=1.0, seed=7)
        if name != "gpt2":
            ask_both(python, exported, 20, 2 * PROMPT, temperature=0.0)


@pytest.fixture
def driver_library() -> Iterator[Path]:
    """The bundle's library, whose OpenCL can be told to call pocl a GPU, and to fail."""
    library = _driver_library()
    yield library
    for name in ("is_gpu", "refuses", "copies"):  # the process has it only once
        ctypes.c_uint32.in_dll(ctypes.CDLL(str(library)), f"driver_{name}").value = 0


@lru_cache
def _driver_library() -> Path:
    _, parts = bundle_sources(MODEL, gpu=True, **ROWS)
    sources = [*C_FILES, *sorted((RUNTIME / "gpu").glob("*.c")), *parts]
    flags = (f"-I{RUNTIME / 'gpu'}", "-ldl", "-shared", "-fPIC", "-Ddlsym=driver_function")
    return build([Path(__file__).parents[1] / "runtime" / "driver.c", *sources], flags, ".so")


def test_auto_takes_the_faster_engine_and_remembers_it(driver_library: Path, tmp_path: Path) -> None:
    shutil.copytree(kernels(), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.race"))
    choosing: dict[str, Any] = {"engine": Engine.AUTO, "cache": str(tmp_path), "temperature": 0.0, "max_tokens": 20}
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library) as bundle:
        is_gpu, runs = (kind.in_dll(bundle.library, name) for kind, name in (
            (ctypes.c_uint32, "driver_is_gpu"), (ctypes.c_int64, "driver_runs")
        ))  # fmt: skip
        with bundle.session(**choosing) as session:
            assert session.use()["engine_why"] == "OpenCL has no GPU here"
            answer = session.answer(PROMPT, Role.RAW)
        with bundle.session(**choosing | {"cache": None}) as session:
            assert session.use()["engine_why"].startswith("no cache folder is set")
        is_gpu.value = 1
        verdicts = set()
        for _ in range(2):
            with bundle.session(**choosing) as session:
                use = session.use()
                verdicts.add((use["engine"], use["engine_why"]))
                assert use["rows"] == 0
                assert session.answer(PROMPT, Role.RAW) == answer
        assert len(verdicts) == 1, verdicts
        (record,) = tmp_path.glob("*.race")
        measured = record.read_bytes()[:-32]
        assert all(number > 0 for number in struct.unpack_from("4d", measured))
        driver = measured[-32:]
        for cpu, gpu in ((1.0, 2.0), (2.0, 1.0)):  # tokens per second
            record.write_bytes(_sealed(struct.pack("4d", cpu, cpu, gpu, gpu) + driver))
            before = runs.value
            with bundle.session(**choosing, energy=10.0) as session:
                use, faster = session.use(), Engine.GPU if gpu > cpu else Engine.CPU
                assert (use["engine"], runs.value) == (faster, before)
                assert use["engine_why"] == (
                    f"the {faster.name} was faster: 128 tokens of a prompt and 128 of an answer take it 128000 ms, the "
                    f"{'CPU' if gpu > cpu else 'GPU'} 256000 ms (measured)"
                )
        another_driver = _sealed(struct.pack("4d", 1.0, 1.0, 2.0, 2.0) + bytes(32))
        for outdated in (measured + bytes(32), another_driver):
            record.write_bytes(outdated)
            with bundle.session(**choosing, time=10.0) as session:
                use = session.use()
                assert (use["engine"], runs.value) == (Engine.CPU, before)
                assert use["engine_why"] == "nothing is timed in a session with a limit of time or energy"
            assert record.read_bytes() == outdated
            bundle.session(**choosing).end()
            assert runs.value > before
            assert record.read_bytes() == _sealed(record.read_bytes()[:-32])
            assert record.read_bytes()[32:64] == driver
            before = runs.value


def test_driver_refusals_are_remembered(driver_library: Path, tmp_path: Path) -> None:
    """Neither to compile what it cannot, nor to load binaries that it no longer takes."""
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library) as bundle:
        is_gpu, refuses, compiles = (
            ctypes.c_uint32.in_dll(bundle.library, f"driver_{name}") for name in ("is_gpu", "refuses", "compiles")
        )
        is_gpu.value, refuses.value, before = 1, 1, compiles.value
        for engine in (Engine.GPU, Engine.AUTO, Engine.GPU):
            if engine == Engine.AUTO:
                with bundle.session(engine=engine, cache=str(tmp_path)) as session:
                    assert "cannot compile the bundle's kernels (OpenCL error -11)" in session.use()["engine_why"]
            else:
                with pytest.raises(UnsupportedError, match=r"cannot compile the bundle's kernels \(OpenCL error -11\)"):
                    bundle.session(engine=engine, cache=str(tmp_path))
        assert compiles.value == before + 1
        (kept,) = tmp_path.glob("*.cl")
        kept.write_bytes(_sealed(struct.pack("<Q", 64) + bytes(64)))  # a binary
        refuses.value = 2
        bundle.session(engine=Engine.GPU, cache=str(tmp_path)).end()
        assert compiles.value > before + 2
        assert kept.stat().st_size > 1000


def _sealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def test_lost_device_is_a_status(driver_library: Path) -> None:
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library) as bundle:
        check_lost_device(bundle, bundle.library, "OpenCL error -36", cache=kernels())


def test_device_chooses_tokens(driver_library: Path) -> None:
    """Of a greedy answer logits come to the process for the first token only, of a draw the largest; and what was run
    beyond a stop leaves nothing behind."""
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": 1, "max_tokens": 60}
    logits = 4 * model_of(MODEL).spec.vocab
    with (
        open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library) as bundle,
        bundle.session(engine=Engine.GPU, cache=kernels(), **greedy) as gpu,
        bundle.session(engine=Engine.CPU, **greedy) as cpu,
    ):
        read = ctypes.c_int64.in_dll(bundle.library, "driver_read")
        before = read.value
        tokens, text, _ = gpu.answer("abc", Role.RAW)
        assert (tokens, text) == cpu.answer("abc", Role.RAW)[:2]
        assert logits + 4 * 59 <= read.value - before < 2 * logits + 4 * 4 * 59
        for more, least in (({"top_k": 8, "top_p": 0.9}, logits + 59 * 512), ({"repeat_penalty": 1.1}, 60 * logits)):
            before = read.value
            answers = []
            for session in (gpu, cpu):
                session.rewind()
                session.set(**greedy | {"temperature": 1.0, "seed": 3} | more)
                answers.append(session.answer("def", Role.RAW))
            assert answers[0] == answers[1]
            assert least <= read.value - before < 1.5 * least
        for session in (gpu, cpu):
            session.rewind()
            session.set(**greedy, stop=[text[20:24]])
        for prompt in ("abc", "def"):  # the second one follows the first one's answer
            assert gpu.answer(prompt, Role.RAW) == cpu.answer(prompt, Role.RAW)
            assert gpu.use()["rows"] == cpu.use()["rows"]


def test_weights_stay_mapped_where_the_driver_shares_them(driver_library: Path) -> None:
    folder = bundle_of(MODEL, gpu=True, **ROWS)
    weights = json.loads((folder / "manifest.json").read_text())["gpu"]["bytes"]["weights"]
    greedy: dict[str, Any] = {"temperature": 0.0, "ignore_eos": 1, "max_tokens": 40}
    answers, found = [], []
    with open_bundle(folder, driver_library) as bundle:
        shared = ctypes.c_int64.in_dll(bundle.library, "driver_shared")
        for copies in (0, 1):
            ctypes.c_uint32.in_dll(bundle.library, "driver_copies").value, before = copies, shared.value
            with bundle.session(engine=Engine.GPU, cache=kernels(), **greedy) as gpu:
                found.append(shared.value - before)
                answers.append((gpu.answer(PROMPT, Role.RAW), gpu.use()["gpu_bytes"]))
    assert found == [weights, 0]
    assert answers[0] == answers[1]


def test_prompt_is_cancelled_within_a_chunk(driver_library: Path) -> None:
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library) as bundle:
        check_cancelled_prompt(bundle, bundle.library, cache=kernels())


def test_bundles_without_programs_say_so() -> None:
    with open_bundle(bundle_of(MODEL, **ROWS)) as bundle:
        with pytest.raises(UnsupportedError, match="export it with --gpu"):
            bundle.session(engine=Engine.GPU)
        with pytest.raises(InputError, match="4 is not an edge_engine"):
            bundle.session(engine=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, "gemma3"])
def test_sanitizers_find_nothing(name: str) -> None:
    model, parts = bundle_sources(name, gpu=True, **ROWS)
    sources = [*C_FILES, *sorted((RUNTIME / "gpu").glob("*.c")), *parts]
    answers_in_c(sources, (f"-I{RUNTIME / 'gpu'}", "-ldl", *CHECKED), model, Engine.GPU, kernels(), 100)
