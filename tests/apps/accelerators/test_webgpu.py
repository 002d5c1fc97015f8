"""The pass of exported models on a GPU, by webgpu.h: the answers of edge's own GPU engine, and of the CPU.

The library is wgpu-native of the package wgpu, lavapipe stands in for a GPU.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_sessions
import pytest
from bundles import build_with, bundle_of, refused
from conftest import exhaustive
from ctypes_bundle import Bundle, open_bundle
from gpu_sessions import GREEDY, MODEL, PROMPT, ROWS, ask_both, kernels, sessions, stand_in, variable
from runtime_library import CHECKED, RUNTIME, build, said_by

from edge.apps.enums import Engine, Finish, Role
from edge.backends.tvm.gpu.hosts import host_named
from edge.errors import EngineError, UnsupportedError

RESOURCES = Path(pytest.importorskip("wgpu").__file__).parent / "resources"
LIBRARY = RESOURCES / "libwgpu_native-release.so"
# A gated delta net, short convolutions, Mamba-2, Mamba-1 with attention and without; mixtures
HYBRIDS = ("qwen35", "lfm2", "granitehybrid", "jamba", "falcon-mamba", "qwen35moe")


@pytest.fixture(autouse=True)
def adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "wgpu")


@pytest.fixture
def bundle() -> Iterator[Bundle]:
    """Its adapter can be told to call itself a GPU, and to fail."""
    with open_bundle(bundle_of(MODEL, gpu=True, **ROWS), driver_library()) as opened:
        yield opened
        for name in ("is_gpu", "refuses", "hangs"):
            variable(opened.library, name).value = 0
        for name in ("fails_at", "cancels_at"):
            variable(opened.library, name).value = -1


def driver_library(name: str = MODEL, **options: Any) -> Path:
    """Without OpenCL. options: of the bundle, beside those of all."""
    replaced = {"dlopen": "open", "dlsym": "function", "clock_gettime": "clock", "nanosleep": "sleep"}
    flags = ("-shared", "-fPIC", f'-DWGPU_LIBRARY="{LIBRARY}"', *(f"-D{a}=driver_{b}" for a, b in replaced.items()))
    return build_with(("webgpu_driver.c",), name, *flags, gpu=True, **ROWS, **options)[1]


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


@pytest.mark.parametrize(("refuses", "says"), [
    (1, "WebGPU's adapter cannot run the bundle (its buffers are too small)"),
    exhaustive(2, "llvmpipe .* cannot be opened (WebGPU: .*)"),
    exhaustive(3, "WebGPU has no adapter here"),
    exhaustive(4, "llvmpipe .* cannot compile the bundle's kernels (WebGPU: .*)"),
    (5, "the app's wgpu-native is version 22: bring version 29, or"),
    exhaustive(6, "the app's library of webgpu.h lacks functions: bring wgpu-native 29, or"),
])  # fmt: skip
def test_refusals_are_statuses_and_the_cpu_answers(bundle: Bundle, refuses: int, says: str, tmp_path: Path) -> None:
    variable(bundle.library, "refuses").value = refuses
    pattern = re.escape(says).replace(r"\.\*", ".*").replace(r"\ ", " ")
    refused(UnsupportedError, f"^{pattern}.* set engine to cpu or auto$", bundle.session, engine=Engine.GPU)
    variable(bundle.library, "is_gpu").value = 1
    with bundle.session(engine=Engine.AUTO, cache=str(tmp_path), **GREEDY) as session:
        use = session.use()
        assert use["engine"] == Engine.CPU
        assert re.match(pattern.replace("adapter here", "GPU here").partition(":")[0], use["engine_why"])
        assert session.answer(PROMPT, Role.RAW)[2] == Finish.LENGTH


def test_fixed_state_returns_to_earlier_turns() -> None:
    """Also behind a prompt that was cancelled within a chunk, and on the other engine."""
    name = HYBRIDS[0]
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 7, "ignore_eos": 1, "max_tokens": 8}
    with (
        open_bundle(bundle_of(name, gpu=True, **ROWS), driver_library(name)) as bundle,
        bundle.session(engine=Engine.CPU, **drawn) as cpu,
        gpu_sessions.cancelled_session(bundle) as (gpu, runs, cancels_at),
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
def test_device_that_hangs_is_a_status(bundle: Bundle) -> None:
    """It is asked, not waited for, and left as it is; another session goes on."""
    hangs = variable(bundle.library, "hangs")
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
])  # fmt: skip
def test_budgets_end_answers_as_on_the_cpu(bundle: Bundle, budget: dict[str, float], finish: Finish) -> None:
    """Both sessions get the same readings: a token takes 100 s and 1,000 J."""
    answers, ahead = [], variable(bundle.library, "ahead")
    for engine in (Engine.GPU, Engine.CPU):
        with bundle.session(engine=engine, **GREEDY, **budget) as session:
            tokens: list[int | None] = []
            session.read(joules=1000.0)
            session.append(Role.RAW, PROMPT)
            while not (piece := session.next()).finish:
                tokens.append(piece.token)
                ahead.value += 100
                session.read(joules=1000.0 * (1 + len(tokens)))
            assert piece.finish == finish
            answers.append(tokens)
    assert answers[0] == answers[1]
    assert len(answers[0]) < GREEDY["max_tokens"]


@pytest.mark.exhaustive
def test_lost_device_is_a_status(bundle: Bundle) -> None:
    gpu_sessions.check_lost_device(bundle, "WebGPU: .+", later=40)


def test_answer_is_cancelled_within_a_burst(bundle: Bundle) -> None:
    """Tokens that were submitted ahead, two submissions each, do not reach the app."""
    with gpu_sessions.cancelled_session(bundle) as (gpu, runs, cancels_at):
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
    real = ("-DEDGE_WEBGPU_HEADER=<webgpu.h>", f"-isystem{RESOURCES}")
    for source in ("webgpu.c", "webgpu_kernels.c"):
        build([source], (*real, "-c"), ".o")
    built = [build([program]), build([program, LIBRARY], (*real, f"-Wl,-rpath,{RESOURCES}"))]
    said = [said_by(each) for each in built]
    assert said[0] == said[1]
    assert "WGPULimits.maxImmediateSize" in said[0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [MODEL, HYBRIDS[0]])
def test_sanitizers_find_nothing(name: str, tmp_path: Path) -> None:
    model, program = build_with(("gpu_answers.c",), name, *CHECKED, gpu=True, **ROWS)
    gpu_sessions.answers_in_c(program, model, Engine.GPU, kernels(), 40, environment(tmp_path))


@pytest.mark.exhaustive
def test_process_without_python_stays_below_the_manifests_peak(tmp_path: Path) -> None:
    """With nothing compiled before, then with all that edge and the driver keep."""
    folder, kept, compiled = bundle_of(MODEL, gpu=True, **ROWS), tmp_path / "kept", tmp_path / "compiled"
    planned = json.loads((folder / "manifest.json").read_text())["gpu"]["peak"]
    kept.mkdir()
    surroundings = environment(tmp_path) | {"MESA_SHADER_CACHE_DIR": str(compiled)}
    for _ in range(2):
        assert 8 << 20 < gpu_sessions.peak_in_c(folder, Engine.GPU, kept, 8, surroundings) < planned
    assert any(compiled.iterdir())  # or else the first run has compiled nothing


@pytest.mark.exhaustive
def test_answers_with_adapters_are_those_of_the_gpu_engine(tmp_path: Path) -> None:
    gpu_sessions.check_adapters(tmp_path, driver_library(lora_rank=32))
