"""Passes that the C runtime runs give the logits of the Python engine, bit for bit."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import open_golden
from runtime_library import build

from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.devices.profile import Power
from edge.embed import model_file
from edge.embed.model_file import Section
from edge.kv import make_policy
from edge.model.model import Model
from edge.types import AnyArray, FloatArray, IntArray

pytest.importorskip("tvm_ffi")

from edge.backends.tvm.compiler.embedded import embedded_designs, embedded_objects, passes_source
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.targets import choose_target, target_named

pytestmark = pytest.mark.slow

HARNESS = Path(__file__).parent / "runtime" / "pass_harness.c"
SOURCES = (
    "pass.c", "platform.c", "cpu.c", "error.c", "model.c", "rows.c", "kv.c", "kv_keys.c", "kv_state.c",
)  # fmt: skip
QEMU, COMPILER = "qemu-aarch64-static", "aarch64-linux-gnu-gcc"


@dataclass(frozen=True)
class Case:
    model: str = "llama-gqa-tied"
    dtype: str = "f16"
    policy: str = "full"
    threads: int = 2
    capacity: int = 128

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(self.capacity, 16, self.dtype, self.threads, observes=self.policy == "h2o")

    @property
    def runs(self) -> list[IntArray]:
        """Tokens of passes: chunks, whole and not, among steps that go beyond the table of angles."""
        rng, sizes = np.random.default_rng(5), [16, 7, *[1] * 60, 16, *[1] * 4, 13]
        vocab = _open(self.model).spec.vocab
        return [rng.integers(3, vocab, size).astype(np.int32) for size in sizes]


@lru_cache
def _open(name: str) -> Model:
    return open_golden(name).model


@dataclass(frozen=True)
class Expected:
    logits: FloatArray  # [passes, vocab]
    attention: FloatArray  # of the heads, one behind the other
    normals: FloatArray


@lru_cache
def run_here(case: Case) -> Expected:
    model = _open(case.model)
    engine: Any = find_backend("tvm", model.file, model.spec).load(model.file, model.spec, case.config)
    engine.observe(16 if case.policy == "h2o" else 0)
    logits = np.array([engine.forward(tokens).copy() for tokens in case.runs])
    kv = engine.kv
    attention = kv.store.attention(np.arange(kv.length)) if case.policy == "h2o" else np.zeros(0)
    expected = Expected(logits, np.array(attention, np.float32).reshape(-1), kv.store.rows.normals.copy())
    engine.close()
    return expected


def write_model(path: Path, case: Case, isa: str, most_threads: int) -> None:
    """model.edge of this case for an instruction set, with memory for so many threads."""
    model = _open(case.model)
    layout = make_layout(model.file, model.spec)
    config = EngineConfig(**{**case.config.__dict__, "threads": most_threads})
    sections = {
        Section.CONFIG: model_file.config_section(
            model, layout, config, make_policy(case.policy), 8, sampling=model.sampling(),
            power=Power(2.0, 1.0, 20.0), kv_bytes=1, scratch_bytes=1, peak=1,
        ),
        Section.LAYERS: model_file.layers_section(layout),
        Section.DESIGNS: model_file.designs_section(layout, config, [target_named(isa, isa)]),
        Section.ANGLES: model_file.angles_section(model, layout, config),
        Section.NORMALS: model_file.normals_section(run_here(case).normals) if case.dtype == "int4" else b"",
        Section.STRINGS: model_file.strings_section(case.model, "", case.policy, case.dtype),
    }  # fmt: skip
    model_file.write_model(path, sections, bytes(32), model.file, layout)


def build_harness(
    folder: Path, case: Case, isa: str, flags: Sequence[str] = (), compiler: str = "cc", machine: str = ""
) -> Path:
    model = _open(case.model)
    layout = make_layout(model.file, model.spec)
    designs = embedded_designs(layout, case.dtype, machine or platform.machine(), "linux", isas=[isa])
    (folder / "passes.c").write_text(passes_source(designs))
    objects = embedded_objects(designs)
    return build([*SOURCES, HARNESS, folder / "passes.c", *objects], ["-O1", *flags], compiler=compiler)


def run_harness(
    folder: Path, command: Sequence[str | Path], case: Case, isa: str, cpus: int = 0, restart: int = 0
) -> tuple[FloatArray, FloatArray]:
    """Logits and attention, as in Expected. restart: the number of a pass before which threads start anew."""
    numbers = [np.array([case.policy == "h2o", len(case.runs)], np.int32)]
    for number, tokens in enumerate(case.runs):
        sign = -1 if restart and number == restart else 1
        numbers += [np.array([sign * tokens.size], np.int32), tokens]
    (folder / "input").write_bytes(b"".join(each.tobytes() for each in numbers))
    arguments = [folder / "model.edge", isa, str(case.threads), str(cpus), folder / "input", folder / "output"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    found = np.fromfile(folder / "output", np.float32)
    logits = len(case.runs) * _open(case.model).spec.vocab
    return found[:logits].reshape(len(case.runs), -1), found[logits:]


def host_isa() -> str:
    isa = choose_target().name
    if isa == "generic":
        pytest.skip("this CPU runs none of the embedded passes")
    return isa


def exhaustive(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "case",
    [
        Case(threads=3),
        exhaustive(Case(threads=1)),
        exhaustive(Case(dtype="f32")),
        exhaustive(Case(dtype="int8", threads=3)),
        exhaustive(Case(dtype="int4")),
        exhaustive(Case(policy="h2o")),
        exhaustive(Case("gemma3", "int4", threads=3)),  # a ring, two tables of angles
        exhaustive(Case("gemma3", "f16", "h2o")),
        exhaustive(Case("phi3-longrope", capacity=200)),
        exhaustive(Case("mistral3")),  # queries have a temperature
        exhaustive(Case("gpt2")),  # learned positions
    ],
    ids=str,
)
def test_passes_give_the_engines_logits(tmp_path: Path, case: Case) -> None:
    isa = host_isa()
    write_model(tmp_path / "model.edge", case, isa, case.threads + 1)
    program = build_harness(tmp_path, case, isa)
    logits, attention = run_harness(tmp_path, [program], case, isa, cpus=1, restart=20)
    expected = run_here(case)
    np.testing.assert_array_equal(logits, expected.logits)
    np.testing.assert_array_equal(attention, expected.attention)


def checked(name: str, *flags: str) -> Any:
    return pytest.param(flags, id=name, marks=pytest.mark.exhaustive)


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("-fsanitize=thread",), id="tsan"),
        checked("tsan-condition", "-fsanitize=thread", "-DEDGE_WAIT_ON_ADDRESS"),
        checked("condition", "-DEDGE_WAIT_ON_ADDRESS"),
        checked("asan", "-fsanitize=address,undefined", "-fno-sanitize-recover"),
    ],
)
def test_passes_run_under_sanitizers(tmp_path: Path, flags: tuple[str, ...]) -> None:
    case, isa = Case(threads=3), host_isa()
    write_model(tmp_path / "model.edge", case, isa, case.threads)
    program = build_harness(tmp_path, case, isa, flags)
    logits, _ = run_harness(tmp_path, [program], case, isa, restart=20)
    np.testing.assert_array_equal(logits, run_here(case).logits)


@pytest.mark.parametrize(
    ("isa", "cpu", "case"),
    [
        ("dotprod", "cortex-a76", Case()),
        exhaustive("neon", "cortex-a53", Case()),
        exhaustive("i8mm", "max", Case(dtype="int8")),
        exhaustive("neon", "cortex-a53", Case("gemma3", "int4")),
    ],
)
def test_passes_run_on_arm(tmp_path: Path, isa: str, cpu: str, case: Case) -> None:
    """The engine's logits, as near as test_arm.py finds the engine's own passes for ARM."""
    for program in (QEMU, COMPILER):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}")
    write_model(tmp_path / "model.edge", case, isa, case.threads)
    harness = build_harness(tmp_path, case, isa, ["-static"], COMPILER, "aarch64")
    logits, _ = run_harness(tmp_path, [QEMU, "-cpu", cpu, harness], case, isa)
    expected = run_here(case).logits
    assert alike(logits, expected)


def alike(ours: AnyArray, theirs: AnyArray) -> bool:
    return bool(np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.9999 and np.abs(ours - theirs).max() < 0.1)
