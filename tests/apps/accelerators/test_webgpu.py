"""The pass of exported models on a GPU, by webgpu.h: the answers of edge's own GPU engine, and of the CPU.

The library is wgpu-native of the package wgpu, lavapipe stands in for a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from bundles import bundle_of, bundle_sources
from conftest import exhaustive
from ctypes_bundle import open_bundle
from gpu_sessions import (
    GREEDY,
    MODEL,
    PROMPT,
    ROWS,
    answers_in_c,
    ask_both,
    cancelled_session,
    check_follow_up,
    check_lost_device,
    check_peak,
    kernels,
    sessions,
    stand_in,
)
from runtime_library import C_FILES, CHECKED, RUNTIME, build

from edge.apps.enums import Engine, Finish, Role
from edge.backends.tvm.gpu.hosts import host_named
from edge.errors import EngineError, UnsupportedError

RESOURCES = Path(pytest.importorskip("wgpu").__file__).parent / "resources"
LIBRARY = RESOURCES / "libwgpu_native-release.so"
HERE = Path(__file__).parents[1]
# A gated delta net, short convolutions, Mamba-2, Mamba-1 with attention and without; mixtures
HYBRIDS = ("qwen35", "lfm2", "granitehybrid", "falcon-h1", "nemotron_h", "jamba", "falcon-mamba", "qwen35moe")


@pytest.fixture(autouse=True)
def adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "wgpu")


@pytest.fixture
def driver() -> Iterator[ctypes.CDLL]:
    """The bundle's library without OpenCL, whose adapter can be told to call itself a GPU, and to fail."""
    library = ctypes.CDLL(str(driver_library()))
    yield library
    for name in ("is_gpu", "refuses", "hangs"):
        ctypes.c_uint32.in_dll(library, f"driver_{name}").value = 0
    for name in ("fails_at", "cancels_at"):
        ctypes.c_int64.in_dll(library, f"driver_{name}").value = -1


@lru_cache
def driver_library(name: str = MODEL, **options: Any) -> Path:
    """options: of the bundle, beside those of all."""
    _, parts = bundle_sources(name, gpu=True, **ROWS, **options)
    sources = [*C_FILES, *sorted((RUNTIME / "gpu").glob("*.c")), *parts]
    replaced = {"dlopen": "open", "dlsym": "function", "clock_gettime": "clock", "nanosleep": "sleep"}
    flags = (f"-I{RUNTIME / 'gpu'}", "-ldl", "-shared", "-fPIC", f'-DWGPU_LIBRARY="{LIBRARY}"')
    ours = (f"-D{name}=driver_{replacement}" for name, replacement in replaced.items())
    return build([HERE / "runtime" / "webgpu_driver.c", *sources], (*flags, *ours), ".so")


def environment(folder: Path) -> dict[str, str]:
    """The environment of an app that brings the library, where OpenCL has no device."""
    (folder / "libwgpu_native.so").symlink_to(LIBRARY)
    (folder / "none").mkdir()
    return os.environ | {"LD_LIBRARY_PATH": str(folder), "OCL_ICD_VENDORS": str(folder / "none")}


@pytest.mark.parametrize("name", [MODEL, *(exhaustive(name) for name in HYBRIDS)])
def test_answers_are_those_of_the_gpu_engine_evictions_included(name: str) -> None:
    with sessions(name, driver_library(name), **ROWS) as (python, exported):
        ask_both(python, exported, 90, temperature=0.0)
        ask_both(python, exported, 40, temperature=1.0, seed=7)
        use = exported.use()
        assert (use["engine"], use["evicted"] > 20) == (Engine.GPU, True)
        assert use["gpu"] == host_named("wgpu").adapters()[0].name


@pytest.mark.exhaustive
def test_follow_up_continues_as_on_the_cpu(driver: ctypes.CDLL) -> None:
    with (
        open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library()) as bundle,
        bundle.session(engine=Engine.GPU, **GREEDY) as gpu,
        bundle.session(engine=Engine.CPU, **GREEDY) as cpu,
    ):
        check_follow_up(gpu, cpu)


@pytest.mark.parametrize(("refuses", "says"), [
    (1, "WebGPU's adapter cannot run the bundle (its buffers are too small)"),
    exhaustive(2, "llvmpipe .* cannot be opened (WebGPU: .*)"),
    exhaustive(3, "WebGPU has no adapter here"),
    exhaustive(4, "llvmpipe .* cannot compile the bundle's kernels (WebGPU: .*)"),
    (5, "the app's wgpu-native is version 22: bring version 29, or"),
    exhaustive(6, "the app's library of webgpu.h lacks functions: bring wgpu-native 29, or"),
])  # fmt: skip
def test_refusals_are_statuses_and_the_cpu_answers(
    driver: ctypes.CDLL, refuses: int, says: str, tmp_path: Path
) -> None:
    ctypes.c_uint32.in_dll(driver, "driver_refuses").value = refuses
    pattern = re.escape(says).replace(r"\.\*", ".*").replace(r"\ ", " ")
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library()) as bundle:
        with pytest.raises(UnsupportedError, match=f"^{pattern}.* set engine to cpu or auto$"):
            bundle.session(engine=Engine.GPU)
        ctypes.c_uint32.in_dll(driver, "driver_is_gpu").value = 1
        with bundle.session(engine=Engine.AUTO, cache=str(tmp_path), **GREEDY) as session:
            use = session.use()
            assert use["engine"] == Engine.CPU
            assert re.match(pattern.replace("adapter here", "GPU here").partition(":")[0], use["engine_why"])
            assert session.answer(PROMPT, Role.RAW)[2] == Finish.LENGTH


def test_fixed_state_returns_to_earlier_turns() -> None:
    """Also behind a prompt that was cancelled within a chunk, and on the other engine."""
    name = HYBRIDS[0]
    library = ctypes.CDLL(str(driver_library(name)))
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": 1, "max_tokens": 8}
    with (
        open_bundle(bundle_of(name, gpu=True, **ROWS), driver_library(name)) as bundle,
        bundle.session(engine=Engine.CPU, **drawn) as cpu,
        cancelled_session(bundle, library) as (gpu, runs, cancels_at),
    ):
        gpu.set(**drawn)
        first, second, third = ([70], Role.IDS), (PROMPT[:40], Role.RAW), ("def", Role.RAW)
        turns = [cpu.answer(*turn) for turn in (first, second, third)]
        assert len({text for _, text, _ in turns}) == 3
        assert gpu.answer(*first) == turns[0]  # one token, so that the first chunk goes out in parts
        cancels_at.value = runs.value + 2  # when some layers have changed the state
        assert gpu.answer(*second) == ([], "", Finish.INTERRUPTED)
        cancels_at.value = -1
        assert gpu.answer(*second) == turns[1]
        saved = gpu.save()
        assert gpu.answer(*third) == turns[2]
        gpu.rewind(2)
        assert gpu.answer(*second) == turns[1]
        cpu.load(saved)
        assert cpu.answer(*third) == turns[2]
        gpu.rewind()
        gpu.load(saved)
        assert gpu.answer(*third) == turns[2]


@pytest.mark.exhaustive
def test_device_that_hangs_is_a_status(driver: ctypes.CDLL) -> None:
    """It is asked, not waited for, and left as it is; another session goes on."""
    hangs = ctypes.c_uint32.in_dll(driver, "driver_hangs")
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library()) as bundle:
        with bundle.session(engine=Engine.GPU, **GREEDY) as gpu:
            expected = gpu.answer(PROMPT, Role.RAW)
            gpu.rewind()
            hangs.value = 1
            with pytest.raises(EngineError, match=r"the GPU has failed \(WebGPU: the GPU does not answer\): end"):
                gpu.answer(PROMPT, Role.RAW)
            assert hangs.value == 1
        hangs.value = 0
        with bundle.session(engine=Engine.GPU, **GREEDY) as gpu:
            assert gpu.answer(PROMPT, Role.RAW) == expected


@pytest.mark.parametrize(("budget", "finish"), [
    ({"energy": 8500.0}, Finish.ENERGY), exhaustive({"time": 850.0}, Finish.TIME),
    exhaustive({"power": 1e-6}, Finish.POWER), exhaustive({"max_temp": 40.0}, Finish.THERMAL),
])  # fmt: skip
def test_budgets_end_answers_as_on_the_cpu(driver: ctypes.CDLL, budget: dict[str, float], finish: Finish) -> None:
    """Both sessions get the same readings: a token takes 100 s and 1,000 J, and the device is hot."""
    ahead = ctypes.c_double.in_dll(driver, "driver_ahead")
    with (
        open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library()) as bundle,
        bundle.session(engine=Engine.GPU) as gpu,
        bundle.session(engine=Engine.CPU) as cpu,
    ):
        answers = []
        for session in (gpu, cpu):
            session.set(**GREEDY | budget)
            tokens: list[int | None] = []
            joules = {} if "power" in budget else {"joules": 1000.0}
            session.read(celsius=80.0, **joules)
            session.append(Role.RAW, PROMPT)
            while not (piece := session.next()).finish:
                tokens.append(piece.token)
                ahead.value += 100
                joules = {name: value + 1000 for name, value in joules.items()}
                session.read(celsius=80.0, **joules)
            assert piece.finish == finish
            answers.append(tokens)
        if "time" in budget or "energy" in budget:  # pauses depend on how long a pass took
            assert answers[0] == answers[1]
        assert len(answers[0]) < GREEDY["max_tokens"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, HYBRIDS[0]])
def test_lost_device_is_a_status(name: str) -> None:
    with open_bundle(bundle_of(name, gpu=True, **ROWS), driver_library(name)) as bundle:
        check_lost_device(bundle, ctypes.CDLL(str(driver_library(name))), "WebGPU: .+", later=40)


def test_answer_is_cancelled_within_a_burst(driver: ctypes.CDLL) -> None:
    """Tokens that were submitted ahead, two submissions each, do not reach the app."""
    with (
        open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library()) as bundle,
        cancelled_session(bundle, driver) as (gpu, runs, cancels_at),
    ):
        expected = gpu.answer(PROMPT, Role.RAW)[0]
        gpu.rewind()
        gpu.append(Role.RAW, PROMPT)
        tokens: list[int | None] = []
        while len(tokens) < 20:  # pieces of a prompt that is still read have none
            tokens += [token for token in [gpu.next().token] if token is not None]
        cancels_at.value = runs.value
        pieces = list(gpu.pieces())
        assert pieces[-1].finish == Finish.INTERRUPTED
        tokens += [piece.token for piece in pieces[:-1]]
        assert tokens == expected[: len(tokens)]
        burst = 1 + len(tokens) // 4
        assert 0 < runs.value - cancels_at.value <= 2 * burst
        assert gpu.use()["rows"] <= len(gpu.tokenize(PROMPT)) + 1 + len(tokens)


def test_declarations_are_those_of_the_header(tmp_path: Path) -> None:
    """The driver compiles with the real webgpu.h, and structures and numbers are the same with ours."""
    ours = (RUNTIME / "gpu" / "webgpu_abi.h").read_text()
    callbacks = re.findall(r"^CALLBACK_INFO\((\w+)\)", ours, re.MULTILINE)
    fields = {f"WGPU{name}CallbackInfo": ["mode", "callback", "userdata2"] for name in callbacks}
    for body, name in re.findall(r"typedef struct(?: \w+)? \{([^{}]*)\} (WGPU\w+);", ours):
        fields[name] = re.findall(r"(\w+)(?=[;,])", body)
    numbers = set(re.findall(r"\bWGPU[A-Za-z0-9]+_\w+\b", ours))
    functions = re.findall(r"X\(([\w *]+), (wgpu\w+), +(?:\\\n +)?(\([^()]*\))\)", ours)
    assert len(fields) > 25
    assert len(numbers) > 20
    assert len(functions) == 43
    shown = [
        *(f'printf("{name} %zu\\n", sizeof({name}));' for name in fields),
        *(f'printf("{name}.{each} %zu\\n", offsetof({name}, {each}));' for name in fields for each in fields[name]),
        *(f'printf("{name} %llu\\n", (unsigned long long){name});' for name in sorted(numbers)),
    ]  # fmt: skip
    program = tmp_path / "layouts.c"
    checks = "".join(
        f"{result} (*const {name}_)({arguments[1:-1]}) = {name};\n" for result, name, arguments in functions
    )
    program.write_text(
        '#include <stdio.h>\n#include "webgpu_abi.h"\n'
        + f"#ifdef EDGE_WEBGPU_HEADER\n{checks}#include <wgpu.h>\n"
        + "WGPUBool (*const poll)(WGPUDevice, WGPUBool, const WGPUSubmissionIndex *) = wgpuDevicePoll;\n"
        + "uint32_t (*const version)(void) = wgpuGetVersion;\n#endif\n"
        + "int main(void)\n{\n" + "\n".join(shown) + "\nreturn 0;\n}\n"
    )  # fmt: skip
    own = (f"-I{RUNTIME / 'gpu'}",)
    real = (*own, "-DEDGE_WEBGPU_HEADER=<webgpu.h>", f"-isystem{RESOURCES}")
    for source in ("webgpu.c", "webgpu_kernels.c"):
        build([RUNTIME / "gpu" / source], (*real, "-c"), ".o")
    built = [build([program], own), build([program, LIBRARY], (*real, f"-Wl,-rpath,{RESOURCES}"))]
    said = [subprocess.run([each], capture_output=True, text=True, check=True).stdout for each in built]
    assert said[0] == said[1]
    assert "WGPULimits.maxImmediateSize" in said[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, "gemma3", HYBRIDS[0]])
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    model, parts = bundle_sources(name, gpu=True, **ROWS)
    sources = [*C_FILES, *sorted((RUNTIME / "gpu").glob("*.c")), *parts]
    flags = (f"-I{RUNTIME / 'gpu'}", "-ldl", *CHECKED)
    answers_in_c(sources, flags, model, Engine.GPU, kernels(), 40, environment(tmp_path))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, "gemma4"])
def test_process_without_python_stays_below_the_manifests_peak(name: str, tmp_path: Path) -> None:
    check_peak(name, tmp_path, environment(tmp_path))
