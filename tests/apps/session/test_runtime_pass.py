"""Passes that the C runtime runs give the logits of the Python engine, bit for bit."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive
from ctypes_bundle import open_bundle
from runtime_library import PLATFORM, build

from edge import export
from edge.apps.enums import Finish, Role
from edge.apps.sections import model_file
from edge.apps.sections.model_file import Section
from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.devices.profiles.profile import Power
from edge.kv import make_policy
from edge.model.model import Model, open_model
from edge.types import FloatArray, IntArray

pytest.importorskip("tvm_ffi")

from edge.backends.tvm.compiler.exported import exported_designs, exported_objects, passes_source
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.backends.tvm.targets import choose_target, target_named

pytestmark = pytest.mark.slow

HARNESS = Path(__file__).parents[1] / "runtime" / "pass_harness.c"
SOURCES = (
    "pass.c", "inputs.c", "team.c", *PLATFORM, "cpu.c", "error.c", "model.c", "rows.c", "kv.c", "kv_keys.c",
    "kv_regions.c", "kv_state.c", "scores.c", "table.c", "given.c", "places.c",
)  # fmt: skip
CHUNK = 16
SIZES = (16, 7, *[1] * 60, 16, *[1] * 4, 13)  # chunks, whole and not, among steps beyond the table of angles


@dataclass(frozen=True)
class Case:
    """sizes: tokens of each pass."""

    model: str = "llama-gqa-tied"
    dtype: str = "f16"
    policy: str = "full"
    threads: int = 2
    sizes: tuple[int, ...] = SIZES
    capacity: int = 128

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(self.capacity, CHUNK, self.dtype, self.threads, observes=self.policy == "h2o")


@lru_cache
def open_case(name: str) -> Model:
    return open_model(GOLDEN / f"{name}.gguf")


def tokens_of(model: Model, case: Case) -> list[IntArray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, model.spec.vocab, size).astype(np.int32) for size in case.sizes]


@dataclass(frozen=True)
class Expected:
    logits: FloatArray  # [passes, vocab]
    attention: FloatArray  # of the heads, one behind the other
    normals: FloatArray


@lru_cache
def run_engine(model: Model, case: Case) -> Expected:
    engine: Any = find_backend("cpu", model.file, model.spec).load(model.file, model.spec, case.config)
    observes = case.policy == "h2o"
    engine.observe(CHUNK if observes else 0)
    logits = np.array([engine.forward(tokens).copy() for tokens in tokens_of(model, case)])
    store = engine.kv.store
    paid = store.attention(np.arange(engine.kv.length)).reshape(-1) if observes else np.zeros(0, np.float32)
    expected = Expected(logits, paid, engine.normals.copy())
    engine.close()
    return expected


def layout_of(model: Model) -> PackedLayout:
    """That of libraries."""
    return make_layout(model.file, model.spec, halve=True)


def make_sections(model: Model, case: Case, isa: str, most_threads: int) -> dict[Section, bytes]:
    """Sections of model.edge for a case and an instruction set, with memory for so many threads."""
    layout, config = layout_of(model), replace(case.config, threads=most_threads)
    sections = {
        Section.CONFIG: model_file.config_section(
            model, layout, config, make_policy(case.policy), 8, chat=False, sampling=model.sampling(),
            power=Power(2.0, 1.0, 20.0), kv_bytes=1, scratch_bytes=1, peak=1,
        ),
        Section.LAYERS: model_file.layers_section(model, layout, case.dtype),
        Section.DESIGNS: model_file.designs_section(model, layout, config, [target_named(isa, isa)]),
        Section.ANGLES: model_file.angles_section(model, layout, config),
        Section.STRINGS: model_file.strings_section(case.model, "", case.policy, case.dtype),
    }  # fmt: skip
    if case.dtype == "int4":
        sections[Section.NORMALS] = model_file.normals_section(run_engine(model, case).normals)
    return sections


def write_model(path: Path, model: Model, case: Case, isa: str, most_threads: int) -> None:
    sections = make_sections(model, case, isa, most_threads)
    model_file.write_model(path, sections, bytes(32), model.file, layout_of(model))


def build_harness(folder: Path, model: Model, case: Case, isa: str, flags: Sequence[str] = ()) -> Path:
    designs = exported_designs(layout_of(model), case.dtype, platform.machine(), "linux", isas=[isa])
    (folder / "passes.c").write_text(passes_source(designs))
    (folder / "trusted.c").write_text(model_file.trusted_source(make_sections(model, case, isa, case.threads)))
    parts = [*SOURCES, HARNESS, folder / "passes.c", folder / "trusted.c", *exported_objects(designs)]
    return build(parts, ["-O1", *flags])


def run_harness(
    folder: Path, program: Path, case: Case, isa: str, runs: Sequence[IntArray], *, cpus: int = 0,
    restart: int = 0, refuses: bool = False, enough: int = 0,
) -> FloatArray:  # fmt: skip
    """Logits and attention, one behind the other. restart: the number of a pass before which threads start anew.
    enough: of the largest logits of a step; 0: all are wanted."""
    numbers = [np.array([case.policy == "h2o", enough, len(runs)], np.int32)]
    for number, tokens in enumerate(runs):
        sign = -1 if restart and number == restart else 1
        numbers += [np.array([sign * tokens.size], np.int32), tokens.astype(np.int32)]
    (folder / "input").write_bytes(b"".join(each.tobytes() for each in numbers))
    arguments = [folder / "model.edge", isa, str(case.threads), str(cpus), folder / "input", folder / "output"]
    done = subprocess.run([str(each) for each in (program, *arguments)], capture_output=True, text=True, timeout=300)
    assert done.stderr.strip() == ("a pass is refused:" if refuses else "")
    assert done.returncode == int(refuses)
    return np.fromfile(folder / "output", np.float32)


def host_isa() -> str:
    isa = choose_target().name
    if isa == "generic":
        pytest.skip("this CPU runs none of the exported passes")
    return isa


@pytest.mark.parametrize("case", [
    Case(threads=3),
    exhaustive(Case(threads=1)),
    exhaustive(Case(dtype="f32")),
    exhaustive(Case(dtype="int8", threads=3)),
    exhaustive(Case(dtype="int4")),
    exhaustive(Case(policy="h2o")),
    exhaustive(Case("gemma3", "int4", threads=3)),  # a ring, two tables of angles
    exhaustive(Case("gemma3", "f16", "h2o")),
    exhaustive(Case("phi3-longrope", sizes=(*[16] * 15, *[1] * 30, 16), capacity=400)),  # 256 have short factors
    exhaustive(Case("mistral3")),  # queries have a temperature
    exhaustive(Case("gpt2", "f32")),  # learned positions; other rows lack biases that those of apps have
    Case("deepseek2", "f32", threads=3),  # latent attention
    exhaustive(Case("minicpm3", "int8")),  # whose RoPE pairs halves
    *(exhaustive(Case("deepseek2", dtype, "h2o")) for dtype in ("int8", "int4")),
    Case("qwen35", threads=3),  # a gated delta net; rows of which bundles have code, too
    exhaustive(Case("qwen35", "int4", "h2o")),
    exhaustive(Case("lfm2")),  # a short convolution
    exhaustive(Case("lfm2", "f32", threads=1)),
    exhaustive(
        Case("gemma4", threads=3)
    ),  # rings with heads of another size, rows of earlier layers, per-layer embeddings
    exhaustive(Case("gemma4", "int4", "h2o")),
    exhaustive(Case("gemma4", "int8", threads=1)),
    exhaustive(Case("falcon-h1", threads=3)),  # Mamba-2 beside attention
    exhaustive(Case("falcon-mamba", "f32", threads=3)),  # Mamba-1 without attention
    exhaustive(Case("jamba", "int8")),
    exhaustive(Case("kimi-linear", threads=3)),  # Kimi Delta Attention
    exhaustive(Case("ling", threads=3)),  # bounded, gated latent heads, experts in groups
    exhaustive(Case("granitehybrid", "int8")),
    exhaustive(Case("nemotron_h", policy="h2o")),
    exhaustive(Case("gpt-oss", threads=3)),  # a mixture of experts, sinks, a ring
    exhaustive(Case("gpt-oss", "int8", "h2o")),
    exhaustive(Case("qwen35moe", policy="h2o")),  # a shared expert
    exhaustive(Case("gemma4moe", threads=3)),  # beside a dense network
    exhaustive(Case("lfm2moe")),  # a dense layer before mixtures
    exhaustive(Case("qwen3moe", "int4", threads=1)),
], ids=lambda case: f"{case.model} {case.dtype} {case.policy} {case.threads}")  # fmt: skip
def test_passes_give_the_engines_logits(tmp_path: Path, case: Case) -> None:
    """The bundle has memory for one thread more, and threads start anew once."""
    isa, model = host_isa(), open_case(case.model)
    write_model(tmp_path / "model.edge", model, case, isa, case.threads + 1)
    program = build_harness(tmp_path, model, case, isa)
    found = run_harness(tmp_path, program, case, isa, tokens_of(model, case), cpus=1, restart=20)
    expected = run_engine(model, case)
    np.testing.assert_array_equal(found[: expected.logits.size].reshape(expected.logits.shape), expected.logits)
    np.testing.assert_array_equal(found[expected.logits.size :], expected.attention)


def test_passes_that_compiled_code_must_not_see_are_refused(tmp_path: Path) -> None:
    case, isa = Case(threads=3), host_isa()
    model = open_case(case.model)
    write_model(tmp_path / "model.edge", model, case, isa, case.threads)
    program = build_harness(tmp_path, model, case, isa)
    good, vocab = np.full(CHUNK, 5), model.spec.vocab
    full = [good] * (case.capacity // CHUNK)
    for bad in ([good, np.array([5, vocab])], [np.array([-1])], [np.full(CHUNK + 1, 5)], [np.zeros(0)], [*full, good]):
        found = run_harness(tmp_path, program, case, isa, bad, refuses=True)
        assert found.size == vocab * (len(bad) - 1)


@pytest.mark.exhaustive
def test_answer_ends_with_learned_positions(tmp_path: Path) -> None:
    """Rows are evicted, and positions go on."""
    export(GOLDEN / "gpt2.gguf", tmp_path / "bundle", isas=[host_isa()], max_kv_size=64, kv_policy="h2o")
    with open_bundle(tmp_path / "bundle") as bundle, bundle.session(temperature=0, ignore_eos=1) as session:
        prompt = session.tokenize("Hi there")
        tokens, _, finish = session.answer(prompt, Role.IDS)
        assert finish == Finish.CAPACITY
        assert len(prompt) + len(tokens) - 1 == bundle.info()["context"]  # the last one was never run


def checked(name: str, *flags: str) -> Any:
    return exhaustive(flags, id=name)


@pytest.mark.wing("C under a sanitizer")
@pytest.mark.parametrize("flags", [
    pytest.param(("-fsanitize=thread",), id="tsan"),
    checked("tsan-condition", "-fsanitize=thread", "-DEDGE_WAIT_ON_ADDRESS"),
    checked("condition", "-DEDGE_WAIT_ON_ADDRESS"),
    checked("asan", "-fsanitize=address,undefined", "-fno-sanitize-recover"),
])  # fmt: skip
def test_passes_run_under_sanitizers(tmp_path: Path, flags: tuple[str, ...]) -> None:
    case, isa = Case(threads=3), host_isa()
    model = open_case(case.model)
    write_model(tmp_path / "model.edge", model, case, isa, case.threads)
    program = build_harness(tmp_path, model, case, isa, flags)
    found = run_harness(tmp_path, program, case, isa, tokens_of(model, case), restart=20)
    np.testing.assert_array_equal(found, run_engine(model, case).logits.reshape(-1))
