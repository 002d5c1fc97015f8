"""The native engine's ARM code, compiled and linked here and run by QEMU: the same tokens as on x86.

This shows that the code is right, and nothing of its speed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import exhaustive
from small_models import Small, write_small

from edge.backends import find_backend
from edge.backends.base import Engine, EngineConfig
from edge.devices.profiles import find_profile
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

pytest.importorskip("tvm_ffi")

from edge.backends.tvm import design as design_module
from edge.backends.tvm import engine as engine_module
from edge.backends.tvm import passes as passes_module
from edge.backends.tvm.cpu.arguments import LINE, LINES, Job
from edge.backends.tvm.design import Design
from edge.backends.tvm.export import export

QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-gcc"
for program, package in ((QEMU, "qemu-user-static"), (COMPILER, "gcc-aarch64-linux-gnu")):
    if shutil.which(program) is None:
        pytest.skip(f"no {program}: apt-get install {package}", allow_module_level=True)

HARNESS = Path(__file__).parent / "arm" / "harness.c"
THREADS = 2
DEVICES = {  # and the CPU that QEMU plays: the device's own, or all that QEMU has
    "raspberry-pi-zero-2w": "cortex-a53",
    "raspberry-pi-5": "cortex-a76",
    "pixel-9": "max",
}
Answer = tuple[list[int], FloatArray]  # tokens, and the logits that they are the greatest of, [steps + 1, vocab]
MIXED = {
    "": "Q4_0", "token_embd": "Q8_0", "attn_v": "F16", "attn_k": "IQ4_NL", "ffn_down": "Q4_1", "ffn_gate": "Q4_K",
    "ffn_up": "Q6_K",
}  # fmt: skip


def compile_for(device: str, model: Model, kv_dtype: str, folder: Path) -> Design:
    """Put run.img and run.o into the folder."""
    about = export(model.file, model.spec, find_profile(device), folder, kv_dtype=kv_dtype)
    return Design.from_json(json.dumps(about["design"]))


def build_harness(out: Path, *more: str | Path) -> Path:
    options = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-static", "-pthread")
    subprocess.run([COMPILER, *options, HARNESS, *more, "-o", out], check=True)
    return out


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_harness(tmp_path_factory.mktemp("harness") / "harness")


class Recorder:
    """In place of the engine's threads: keeps copies of all arrays but the weights, as the first job finds them."""

    def __init__(self, _image: object, _threads: int, arguments: Sequence[Any], *, fixed: bool) -> None:
        assert not fixed
        _, *self._arrays = arguments

    def run(self, **_numbers: int) -> None:
        self.found = [array.copy() for array in self._arrays]

    def close(self) -> None: ...


def write_input(path: Path, model: Model, design: Design, prompt: IntArray, steps: int) -> None:
    """Numbers and arrays of a run for the harness: int64 threads, prompt tokens, steps, vocabulary, KV heads of all
    layers; then the arguments of a pass, each as its length in bytes, int64, and its bytes."""
    config = EngineConfig(prompt.size + steps, prompt.size, design.kv_dtype, THREADS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(design_module, "choose_target", lambda: design.target)
        patch.setattr(engine_module, "compiled", lambda *_: None)
        patch.setattr(passes_module, "pointer", lambda array: array)
        patch.setattr(passes_module, "Workers", Recorder)
        engine: Any = engine_module.NativeEngine(model.file, model.spec, config)
        engine.forward(prompt)
        first = np.zeros(len(Job.NAMES), np.int64), np.zeros(LINES * THREADS * LINE, np.int32), engine.passes.weights
        arrays = [*first, *engine.passes.workers.found]
    heads = design.shape.layers * design.shape.kv_heads
    with open(path, "wb") as file:
        file.write(np.array([THREADS, prompt.size, steps, model.spec.vocab, heads], np.int64).tobytes())
        for array in arrays:
            file.write(np.int64(array.nbytes).tobytes() + array.tobytes())


def run_harness(
    program: Path, device: str, model: Model, design: Design, folder: Path, prompt: IntArray, steps: int
) -> Answer:
    files = folder / "input", folder / "logits"
    write_input(files[0], model, design, prompt, steps)
    done = subprocess.run(
        [QEMU, "-cpu", DEVICES[device], program, folder / "code" / "run.img", *files],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()], np.fromfile(files[1], np.float32).reshape(steps + 1, -1)


@lru_cache
def run_here(model: Model, kv_dtype: str, prompt: bytes, steps: int) -> Answer:
    """The same on this machine's CPU, attending in float32; `prompt` is int32."""
    tokens = np.frombuffer(prompt, np.int32)
    config = EngineConfig(tokens.size + steps, tokens.size, kv_dtype, THREADS, tuning={"pair_rows": 0})
    engine: Engine = find_backend("cpu", model.file, model.spec).load(model.file, model.spec, config)
    logits = [engine.forward(tokens).copy()]
    for _ in range(steps):
        logits.append(engine.forward(logits[-1].argmax(keepdims=True)).copy())
    engine.close()
    return [int(each.argmax()) for each in logits], np.array(logits)


def assert_alike(ours: Answer, theirs: Answer, most: float) -> None:
    assert ours[0] == theirs[0]
    assert np.corrcoef(ours[1].ravel(), theirs[1].ravel())[0, 1] > 0.9999
    assert np.abs(ours[1] - theirs[1]).max() < most


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """By KV dtype. Compiling takes most of the time, so all block types are in one model, and few in the other."""
    folder = tmp_path_factory.mktemp("models")
    smalls = {"f16": Small(hidden=256, vocab=275, types=MIXED), "int8": Small(vocab=275, types="Q4_0")}
    return {name: open_model(write_small(folder / f"{name}.gguf", small)) for name, small in smalls.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "kv_dtype"),
    [
        ("pixel-9", "f16"), exhaustive("pixel-9", "int8"), exhaustive("raspberry-pi-5", "f16"),
        exhaustive("raspberry-pi-zero-2w", "int8"),
    ],
)  # fmt: skip
def test_arm_writes_the_same_tokens(
    tmp_path: Path, harness: Path, models: dict[str, Model], device: str, kv_dtype: str
) -> None:
    """The prompt is odd: the last pass over a weight tile serves fewer tokens than it has room for."""
    model = models[kv_dtype]
    design = compile_for(device, model, kv_dtype, tmp_path / "code")
    prompt = np.random.default_rng(5).integers(3, model.spec.vocab, 21).astype(np.int32)
    ours = run_harness(harness, device, model, design, tmp_path, prompt, 24)
    assert_alike(ours, run_here(model, kv_dtype, prompt.tobytes(), 24), 0.3 if design.target.pair_rows else 0.1)
    if (device, kv_dtype) == ("raspberry-pi-5", "f16"):  # a linker makes the object file part of a program
        program = build_harness(tmp_path / "linked", "-DLINKED", tmp_path / "code" / "run.o")
        linked = run_harness(program, device, model, design, tmp_path, prompt, 24)
        assert linked[0] == ours[0]
        np.testing.assert_array_equal(linked[1], ours[1])
