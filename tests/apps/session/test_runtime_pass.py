"""Passes that the C runtime runs give the logits of the Python engine, bit for bit."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import bundle_of, model_of, pair_of
from conftest import exhaustive
from ctypes_bundle import open_bundle
from runtime_library import PLATFORM, build, load_runtime, said_by
from small_models import Small, random_bytes, write_small

from edge.apps.enums import Finish, Role
from edge.apps.sections import model_file
from edge.apps.sections.model_file import TABLE_TYPES, Section
from edge.backends import find_backend
from edge.backends.base import EngineConfig
from edge.backends.tvm.compiler.exported import exported_designs, exported_objects, passes_source
from edge.backends.tvm.packing import layout
from edge.backends.tvm.packing.layout import PackedLayout, make_layout
from edge.backends.tvm.targets import choose_target, target_named
from edge.devices.profiles.profile import Power
from edge.formats.blocks import dequantize
from edge.kv import make_policy
from edge.model.model import Model
from edge.types import FloatArray, IntArray

pytestmark = pytest.mark.slow

SOURCES = (
    "pass.c", "inputs.c", "team.c", *PLATFORM, "cpu.c", "error.c", "model.c", "rows.c", "kv.c", "kv_keys.c",
    "kv_regions.c", "kv_state.c", "scores.c", "table.c", "given.c", "places.c",
)  # fmt: skip
CHUNK, CAPACITY = 16, 128
SIZES = (16, 7, *[1] * 60, 16, *[1] * 4, 13)  # chunks, whole and not, among steps beyond the table of angles


@dataclass(frozen=True)
class Case:
    name: str = "llama-gqa-tied"
    dtype: str = "f16"
    policy: str = "full"
    threads: int = 2

    @property
    def observes(self) -> bool:
        return self.policy == "h2o"

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(CAPACITY, CHUNK, self.dtype, self.threads, observes=self.observes)

    @property
    def passes(self) -> list[IntArray]:
        """Tokens of each."""
        rng, vocab = np.random.default_rng(5), model_of(self.name).spec.vocab
        return [rng.integers(3, vocab, size).astype(np.int32) for size in SIZES]


@dataclass(frozen=True)
class Expected:
    logits: FloatArray  # [passes, vocab]
    attention: FloatArray  # of the heads, one behind the other
    normals: FloatArray


@lru_cache
def run_engine(case: Case) -> Expected:
    model = model_of(case.name)
    engine: Any = find_backend("cpu", model.file, model.spec).load(model.file, model.spec, case.config)
    engine.observe(CHUNK if case.observes else 0)
    logits = np.array([engine.forward(tokens).copy() for tokens in case.passes])
    store = engine.kv.store
    paid = store.attention(np.arange(engine.kv.length)).reshape(-1) if case.observes else np.zeros(0, np.float32)
    expected = Expected(logits, paid, engine.normals.copy())
    engine.close()
    return expected


def layout_of(model: Model) -> PackedLayout:
    """That of libraries."""
    return make_layout(model.file, model.spec, halve=True)


def make_sections(model: Model, case: Case, isa: str) -> dict[Section, bytes]:
    """Sections of model.edge for a case and an instruction set, with memory for one thread more."""
    packed, config = layout_of(model), replace(case.config, threads=case.threads + 1)
    sections = {
        Section.CONFIG: model_file.config_section(
            model, packed, config, make_policy(case.policy), 8, chat=False, sampling=model.sampling(),
            power=Power(2.0, 1.0, 20.0), kv_bytes=1, scratch_bytes=1, peak=1,
        ),
        Section.LAYERS: model_file.layers_section(model, packed, case.dtype),
        Section.DESIGNS: model_file.designs_section(model, packed, config, [target_named(isa, isa)]),
        Section.ANGLES: model_file.angles_section(model, packed, config),
        Section.STRINGS: model_file.strings_section(case.name, "", case.policy, case.dtype),
    }  # fmt: skip
    if case.dtype == "int4":
        sections[Section.NORMALS] = model_file.normals_section(run_engine(case).normals)
    return sections


def run_in_c(folder: Path, case: Case, flags: Sequence[str] = ()) -> FloatArray:
    """Logits and attention, one behind the other. Threads start anew before a pass in the middle."""
    isa, model = host_isa(), model_of(case.name)
    sections = make_sections(model, case, isa)
    model_file.write_model(folder / "model.edge", sections, bytes(32), model.file, layout_of(model))
    designs = exported_designs(layout_of(model), case.dtype, platform.machine(), "linux", isas=[isa])
    (folder / "passes.c").write_text(passes_source(designs))
    (folder / "trusted.c").write_text(model_file.trusted_source(sections))
    tables = folder / "passes.c", folder / "trusted.c"
    program = build([*SOURCES, "pass_harness.c", *tables, *exported_objects(designs)], flags)
    numbers = [np.array([case.observes, len(case.passes)], np.int32)]
    for number, tokens in enumerate(case.passes):
        numbers += [np.array([-tokens.size if number == 20 else tokens.size], np.int32), tokens]
    (folder / "input").write_bytes(b"".join(each.tobytes() for each in numbers))
    said_by(program, folder / "model.edge", isa, case.threads, 1, folder / "input", folder / "output")
    return np.fromfile(folder / "output", np.float32)


def host_isa() -> str:
    isa = choose_target().name
    if isa == "generic":
        pytest.skip("this CPU runs none of the exported passes")
    return isa


def check(found: FloatArray, case: Case) -> None:
    expected = run_engine(case)
    np.testing.assert_array_equal(found[: expected.logits.size].reshape(expected.logits.shape), expected.logits)
    np.testing.assert_array_equal(found[expected.logits.size :], expected.attention)


@pytest.mark.parametrize("case", [
    Case(threads=3),
    Case("deepseek2", "f32", threads=3),  # latent attention
    Case("qwen35", threads=3),  # a gated delta net; rows of which bundles have code, too
    *map(exhaustive, (
        Case(policy="h2o", threads=1),
        Case(dtype="int8"),
        Case("gemma3", "int4", threads=3),  # a ring, two tables of angles
        Case("deepseek2", "int8", "h2o"),
        Case("gemma4", "int4", "h2o"),  # heads of another size, rows of earlier layers, per-layer embeddings
        Case("mistral3"),  # queries have a temperature
        Case("gpt2", "f32"),  # learned positions; other rows lack biases that those of apps have
        Case("minicpm3", "int8"),  # whose RoPE pairs halves
        Case("kimi-linear", threads=3),  # Kimi Delta Attention
        Case("ling", threads=3),  # bounded, gated latent heads, experts in groups
        Case("falcon-h1", threads=3),  # Mamba-2 beside attention
        Case("gemma4moe", threads=3),  # a mixture of experts beside a dense network
    )),
], ids=lambda case: f"{case.name} {case.dtype} {case.policy} {case.threads}")  # fmt: skip
def test_passes_give_the_engines_logits(tmp_path: Path, case: Case) -> None:
    """Other models, in test_runtime_session.py, are compared by their answers."""
    check(run_in_c(tmp_path, case), case)


@pytest.mark.exhaustive
def test_answer_ends_with_learned_positions() -> None:
    """Rows are evicted, and positions go on."""
    folder = bundle_of("gpt2", max_kv_size=64, kv_policy="h2o")
    with open_bundle(folder) as bundle, bundle.session(temperature=0, ignore_eos=1) as session:
        prompt = session.tokenize("Hi there")
        tokens, _, finish = session.answer(prompt, Role.IDS)
        assert finish == Finish.CAPACITY
        assert len(prompt) + len(tokens) - 1 == bundle.info()["context"]  # the last one was never run


@pytest.mark.wing("C under a sanitizer")
@pytest.mark.parametrize("flags", [
    pytest.param(("-fsanitize=thread",), id="tsan"),
    exhaustive(("-fsanitize=thread", "-DEDGE_WAIT_ON_ADDRESS"), id="tsan-condition"),
    exhaustive(("-fsanitize=address,undefined", "-fno-sanitize-recover"), id="asan"),
])  # fmt: skip
def test_passes_run_under_sanitizers(tmp_path: Path, flags: tuple[str, ...]) -> None:
    check(run_in_c(tmp_path, Case(threads=3), flags), Case(threads=3))


def test_head_in_two_stages_has_the_answers_of_the_whole_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Greedy, and drawn from few; and with a penalty that needs the whole head, but is too small to change a logit. The
    vocabulary takes more than one band of tiles, and the last tile has rows that are no tokens."""
    monkeypatch.setattr(layout, "_LEAST_SHARE", 0)  # heads of any size have two stages
    model = write_small(tmp_path / "model.gguf", Small(vocab=2107, types={"": "Q4_0", "token_embd": "Q8_0"}))
    with pair_of(str(model), max_kv_size=512, threads=2) as pair:
        for sampling in ({"temperature": 0}, {"temperature": 1, "top_k": 8, "seed": 3}):
            answers = []
            for penalty in (0, 1e-30):
                pair.forget()
                options = sampling | {"frequency_penalty": penalty, "max_tokens": 40, "ignore_eos": 1}
                answers.append(pair.ask("Write a story about a fox.", raw=True, **options)[0])
            assert answers[0] == answers[1]
            assert len(answers[0]) == 40


@pytest.mark.filterwarnings("ignore")  # of scales that are no numbers
@pytest.mark.parametrize("size", [256, 24])
@pytest.mark.parametrize("kind", TABLE_TYPES)
def test_rows_of_a_table_are_those_of_gguf(kind: str, size: int, tmp_path: Path) -> None:
    """Any bytes of a table of per-layer embeddings, which is read from the file. size: of vectors, which are padded to
    whole vectors of a CPU."""
    vocab, layers = 40, 32 if size % 256 else 7  # rows of whole blocks
    raw = random_bytes(kind, vocab, layers * size, 3)
    path, tokens = tmp_path / "file", np.array([0, vocab - 1, 5, 5], np.int32)
    path.write_bytes(b"before" + raw.tobytes())
    expected = dequantize(raw.reshape(vocab, -1)[tokens], kind).reshape(len(tokens), layers, size)
    expected = expected * np.float32(math.sqrt(size / 2))
    found = np.full((len(tokens), layers, -(-size // 16) * 16), -7, np.float32)
    c = load_runtime("table.c", "rows.c", *PLATFORM, "cpu.c", "error.c", "table_harness.c")
    c.read_table.restype = ctypes.c_bool

    def read(path: Path) -> bool:
        with path.open("rb") as file:
            about = np.array([file.fileno(), vocab, layers, size], np.int32)
            reader = ctypes.cast(getattr(c, f"table_{kind.lower()}"), ctypes.c_void_p)
            where = ctypes.c_uint64(raw.nbytes), ctypes.c_uint64(6 + raw.nbytes)
            arguments = tokens.ctypes.data_as(ctypes.c_void_p), len(tokens), found.ctypes.data_as(ctypes.c_void_p)
            return bool(c.read_table(reader, about.ctypes.data_as(ctypes.c_void_p), *where, *arguments))

    assert read(path)
    np.testing.assert_array_equal(found[..., :size], expected)
    assert (found[..., size:] == -7).all()
    path.write_bytes(path.read_bytes()[:-1])
    assert not read(path)
