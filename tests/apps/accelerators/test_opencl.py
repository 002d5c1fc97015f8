"""The pass of exported models on a GPU, by OpenCL: the same answers as edge's own GPU engine, and as on the CPU.

pocl, an OpenCL driver for CPUs, stands in for a GPU.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_sessions
import pytest
from bundles import build_with, bundle_of, model_of, refused
from conftest import exhaustive
from ctypes_bundle import Bundle, open_bundle
from gpu_sessions import GREEDY, MODEL, PROMPT, ROWS, ask_both, kernels, sessions, stand_in, variable
from runtime_library import CHECKED

from edge.apps.enums import Engine, Finish, Role
from edge.errors import InputError, UnsupportedError


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "opencl")


@pytest.fixture
def bundle() -> Iterator[Bundle]:
    """Its OpenCL can be told to call pocl a GPU, and to fail."""
    flags = ("-shared", "-fPIC", "-Ddlsym=driver_function")
    model, library = build_with(("driver.c",), MODEL, *flags, gpu=True, **ROWS)
    with open_bundle(model.parent, library) as opened:
        yield opened
        for name in ("is_gpu", "refuses", "copies"):  # the process has the library only once
            variable(opened.library, name).value = 0


@pytest.mark.wing("OpenCL")
@pytest.mark.parametrize(("name", "options"), [
    (MODEL, {}),
    *(exhaustive(*each) for each in (
        (MODEL, {"kv_policy": "full", "max_kv_size": 512}),
        (MODEL, {"kv_dtype": "f32", "kv_policy": "window"}),
        ("gemma3", {"kv_dtype": "int4"}),  # rings; pairs of RoPE that are halves
        ("gemma4", {}),  # rings whose heads differ, in an arena of their own, and a table of per-layer embeddings
        ("llama-window", {}),
        ("llama-rope-scaled", {}),
        ("gpt2", {}),  # learned positions, of which there are few
        ("qwen3moe", {}),
        ("qwen35", {"kv_dtype": "int8"}),  # a fixed state
        ("falcon-mamba", {}),  # which has no rows
    )),
])  # fmt: skip
def test_answers_are_those_of_the_gpu_engine_evictions_included(name: str, options: dict[str, Any]) -> None:
    options = ROWS | options
    tokens = 60 if name == "gpt2" else 150
    with sessions(name, **options) as (python, exported):
        ask_both(python, exported, tokens, temperature=0.0)
        ask_both(python, exported, tokens, temperature=1.0, seed=7)
        if name != "gpt2":
            ask_both(python, exported, 20, 2 * PROMPT, temperature=0.0)
        use = exported.use()
        assert (use["engine"], bool(use["gpu"])) == (Engine.GPU, True)
        if (name, options) == (MODEL, ROWS):
            assert use["evicted"] > 100
            manifest = json.loads((bundle_of(name, gpu=True, **options) / "manifest.json").read_text())
            assert use["gpu_bytes"] == sum(manifest["gpu"]["bytes"].values()) < manifest["gpu"]["peak"]


def test_auto_takes_the_faster_engine_and_remembers_it(bundle: Bundle, tmp_path: Path) -> None:
    shutil.copytree(kernels(), tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.race"))
    choosing: dict[str, Any] = {"engine": Engine.AUTO, "cache": str(tmp_path), "temperature": 0.0, "max_tokens": 20}
    with bundle.session(**choosing) as session:
        assert session.use()["engine_why"] == "OpenCL has no GPU here"
        answer = session.answer(PROMPT, Role.RAW)
    with bundle.session(**choosing | {"cache": None}) as session:
        assert session.use()["engine_why"].startswith("no cache folder is set")
    variable(bundle.library, "is_gpu").value, runs = 1, variable(bundle.library, "runs")
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


def test_driver_refusals_are_remembered(bundle: Bundle, tmp_path: Path) -> None:
    """Neither to compile what it cannot, nor to load binaries that it no longer takes."""
    refuses, compiles = variable(bundle.library, "refuses"), variable(bundle.library, "compiles")
    variable(bundle.library, "is_gpu").value, refuses.value, before = 1, 1, compiles.value
    says = r"cannot compile the bundle's kernels \(OpenCL error -11\)"
    for _ in range(2):
        refused(UnsupportedError, says, bundle.session, engine=Engine.GPU, cache=str(tmp_path))
        with bundle.session(engine=Engine.AUTO, cache=str(tmp_path)) as session:
            assert re.search(says, session.use()["engine_why"])
    assert compiles.value == before + 1
    (kept,) = tmp_path.glob("*.cl")
    kept.write_bytes(_sealed(struct.pack("<Q", 64) + bytes(64)))  # a binary
    refuses.value = 2
    bundle.session(engine=Engine.GPU, cache=str(tmp_path)).end()
    assert compiles.value > before + 2
    assert kept.stat().st_size > 1000


def _sealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def test_lost_device_is_a_status(bundle: Bundle) -> None:
    gpu_sessions.check_lost_device(bundle, "OpenCL error -36", cache=kernels())


def test_device_chooses_tokens(bundle: Bundle) -> None:
    """Of a greedy answer logits come to the process for the first token only, of a draw the largest; and what was run
    beyond a stop leaves nothing behind."""
    greedy, logits, read = GREEDY | {"max_tokens": 60}, 4 * model_of(MODEL).spec.vocab, variable(bundle.library, "read")
    with (
        bundle.session(engine=Engine.GPU, cache=kernels(), **greedy) as gpu,
        bundle.session(engine=Engine.CPU, **greedy) as cpu,
    ):
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


def test_weights_stay_mapped_where_the_driver_shares_them(bundle: Bundle) -> None:
    manifest = json.loads((bundle_of(MODEL, gpu=True, **ROWS) / "manifest.json").read_text())
    answers, found, shared = [], [], variable(bundle.library, "shared")
    for copies in (0, 1):
        variable(bundle.library, "copies").value, before = copies, shared.value
        with bundle.session(engine=Engine.GPU, cache=kernels(), **GREEDY) as gpu:
            found.append(shared.value - before)
            answers.append((gpu.answer(PROMPT, Role.RAW), gpu.use()["gpu_bytes"]))
    assert found == [manifest["gpu"]["bytes"]["weights"], 0]
    assert answers[0] == answers[1]


def test_prompt_is_cancelled_within_a_chunk(bundle: Bundle) -> None:
    """Submitted in parts, unless the model has a fixed state, as in test_webgpu.py. The session is as it was before."""
    with gpu_sessions.cancelled_session(bundle, cache=kernels()) as (gpu, runs, cancels_at):
        cancels_at.value = runs.value  # the first one
        assert gpu.answer(PROMPT, Role.RAW) == ([], "", Finish.INTERRUPTED)
        assert runs.value == cancels_at.value + 1
        assert gpu.use()["rows"] == 0
        cancels_at.value = -1
        gpu.rewind()
        answer = gpu.answer(PROMPT, Role.RAW)
        with bundle.session(engine=Engine.CPU, **GREEDY) as cpu:
            assert answer == cpu.answer(PROMPT, Role.RAW)


def test_bundles_without_programs_say_so() -> None:
    with open_bundle(bundle_of(MODEL, **ROWS)) as bundle:
        refused(UnsupportedError, "export it with --gpu", bundle.session, engine=Engine.GPU)
        refused(InputError, "4 is not an edge_engine", bundle.session, engine=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, "gemma3"])
def test_sanitizers_find_nothing(name: str) -> None:
    model, program = build_with(("gpu_answers.c",), name, *CHECKED, gpu=True, **ROWS)
    gpu_sessions.answers_in_c(program, model, Engine.GPU, kernels(), 100)


@pytest.mark.exhaustive
def test_answers_with_adapters_are_those_of_the_gpu_engine(tmp_path: Path) -> None:
    gpu_sessions.check_adapters(tmp_path, kv_dtype="int4")
