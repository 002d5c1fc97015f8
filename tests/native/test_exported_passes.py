"""Passes for apps: object files with C functions for several instruction sets, which compute as the engine's own."""

from __future__ import annotations

import ctypes
import platform
import re
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import open_golden
from runtime_library import build
from small_models import Small, write_small

from edge.backends.base import EngineConfig

pytest.importorskip("tvm_ffi")

from edge.backends.tvm import engine as engine_module
from edge.backends.tvm import passes as passes_module
from edge.backends.tvm.compiler import exported
from edge.backends.tvm.compiler.exported import exported_designs, exported_objects, passes_source
from edge.backends.tvm.cpu.arguments import CROSS, LINE, LINES, Job
from edge.backends.tvm.cpu.generator import LORA, RINGS, STATES
from edge.backends.tvm.design import Design
from edge.backends.tvm.memory import aligned_zeros
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.targets import choose_target
from edge.devices.memory import MemoryLimit, memory_use
from edge.errors import UnsupportedError
from edge.model.model import Model, open_model

# The functions that a pass may call.
OUTSIDE = {"edge_doze", "edge_wake", "edge_now", "edge_worked", "memset", "memcpy", "memmove"}

WAITING = """
#define _GNU_SOURCE
#include <linux/futex.h>
#include <limits.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>
int32_t dozed, woken;
int32_t edge_doze(int32_t *word, int32_t value);
int32_t edge_wake(int32_t *word);
int64_t edge_now(void);
int64_t edge_worked(void);
int64_t edge_now(void) { return 0; }
int64_t edge_worked(void) { return 0; }
int32_t edge_doze(int32_t *word, int32_t value)
{
    __atomic_add_fetch(&dozed, 1, __ATOMIC_SEQ_CST);
    return (int32_t)syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, (void *)0);
}
int32_t edge_wake(int32_t *word)
{
    __atomic_add_fetch(&woken, 1, __ATOMIC_SEQ_CST);
    return (int32_t)syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX);
}
"""


@pytest.fixture(scope="module")
def model() -> Model:
    return open_golden("llama-gqa-tied").model


@pytest.fixture(scope="module")
def designs(model: Model) -> list[Design]:
    """Of all instruction sets of x86-64."""
    return exported_designs(make_layout(model.file, model.spec), "f16", "x86_64", "linux")


def symbols(path: Path, *options: str) -> set[str]:
    said = subprocess.run(["nm", "-P", *options, path], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in said.splitlines()}


@pytest.mark.parametrize(("free", "frugal"), [(8 << 30, False), (500 << 20, True)])
def test_compilers_of_apps_take_turns_where_memory_is_short(
    designs: list[Design], monkeypatch: pytest.MonkeyPatch, free: int, frugal: bool
) -> None:
    started, alone = list[bool](), threading.Lock()

    def make(design: Design, _progress: object, *, frugal: bool) -> Path:
        started.append(frugal)
        if frugal:
            assert alone.acquire(blocking=False)
            time.sleep(0.02)
            alone.release()
        return Path(design.target.name)

    monkeypatch.setattr(exported, "exported_object", make)
    monkeypatch.setattr(exported, "usable_cores", lambda: 4)
    monkeypatch.setattr(exported, "memory_limit", lambda: MemoryLimit(memory_use().rss + free, "free memory"))
    assert exported_objects(designs) == [Path(each.target.name) for each in designs]
    assert started == [frugal] * len(designs)


@pytest.mark.slow
def test_passes_share_a_library_without_other_calls(designs: list[Design]) -> None:
    assert [each.target.name for each in designs] == ["avx512bf16", "avx512vnni", "avxvnni", "avx2"]
    seen = set[str]()
    for design, path in zip(designs, exported_objects(designs), strict=True):
        name = design.target.name
        outside = symbols(path, "--undefined-only") - OUTSIDE - set(design.shared.values())
        assert {each.rpartition("_")[2] for each in outside} == ({design.like} if design.like else set())
        defined = symbols(path, "--extern-only", "--defined-only")
        public = {each for each in defined if each.startswith("edge_")}
        assert f"edge_run_{name}" in public
        assert {each.rpartition("_")[2] for each in public} == {name}
        assert defined - public <= {"tvm_truncsf2", "tvm_extendsf2"}  # weak, and not in the way of a compiler's own
        relocations = subprocess.run(["readelf", "-rW", path], capture_output=True, text=True, check=True).stdout
        assert "edge_doze" in relocations
        assert "sf2" not in relocations  # nor called: code of another instruction set could be linked
        seen |= public
    # step_embed is chunk_embed, avxvnni has avx2's attention, and avx512bf16 but `run` and a chunk's attention
    assert len(seen) == 3 * (2 * 7 + 1) - 3 - 3 + 2
    undefined = symbols(exported_objects(designs[2:3])[0], "--undefined-only") - OUTSIDE
    assert undefined == {f"edge_{name}_avx2" for name in ("verify_attend", "chunk_attend", "chunk_embed")}


class ExportedWorkers:
    """The engine's threads, which run the exported pass instead."""

    run_pass: Callable[..., None]

    def __init__(self, _image: object, threads: int, pointers: Sequence[ctypes.c_void_p], *, fixed: bool) -> None:
        assert not fixed
        self._job, self._lines = aligned_zeros(len(Job.NAMES), "int64"), aligned_zeros(LINES * threads * LINE, "int32")
        for name in ("threads", "parts", "team"):
            self._job[Job.slot(name)] = threads
        optional = (*RINGS, *STATES, *LORA, *CROSS)  # which all exported passes take
        more = [ctypes.c_void_p()] * len(optional)
        arrays = [ctypes.c_void_p(each.ctypes.data) for each in (self._job, self._lines)] + [*pointers, *more]
        self._arguments = [(*arrays, ctypes.c_int64(number)) for number in range(threads)]
        self._others = [threading.Thread(target=type(self).run_pass, args=each) for each in self._arguments[1:]]
        for each in self._others:
            each.start()

    def run(self, **numbers: int) -> None:
        for name, value in numbers.items():
            self._job[Job.slot(name)] = value
        type(self).run_pass(*self._arguments[0])

    def close(self) -> None:
        self.run(kind=Job.QUIT)
        for each in self._others:
            each.join()


@pytest.mark.slow
def test_exported_pass_equals_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
    """Bit for bit, in chunks and steps, on three threads, which sleep and wake by the app's functions."""
    layout, isa = make_layout(model.file, model.spec), choose_target().name
    if isa == "generic":
        pytest.skip("this CPU runs none of the exported passes")
    (design,) = exported_designs(layout, "f16", platform.machine(), "linux", isas=[isa])
    (tmp_path / "waiting.c").write_text(WAITING)
    library = ctypes.CDLL(
        str(build([tmp_path / "waiting.c", *exported_objects([design])], ("-shared", "-fPIC"), ".so"))
    )
    config = EngineConfig(64, 16, "f16", threads=3)
    tokens = np.random.default_rng(3).integers(3, model.spec.vocab, 33).astype(np.int32)

    def answer() -> Any:
        engine = engine_module.NativeEngine(model.file, model.spec, config)
        logits = [engine.forward(tokens[:16]).copy(), engine.forward(tokens[16:29]).copy()]
        logits += [engine.forward(tokens[at : at + 1]).copy() for at in range(29, 33)]
        engine.close()
        return logits

    expected = answer()
    function: Any = getattr(library, design.symbol("run"))
    function.restype = None
    ExportedWorkers.run_pass = function
    monkeypatch.setattr(passes_module, "Workers", ExportedWorkers)
    np.testing.assert_array_equal(answer(), expected)
    assert ctypes.c_int32.in_dll(library, "dozed").value > 0
    assert ctypes.c_int32.in_dll(library, "woken").value > 0


def test_passes_are_listed_from_the_best_to_the_plainest(tmp_path: Path, designs: list[Design]) -> None:
    source = passes_source(designs)
    at = [source.index(f'{{"{name}", edge_run_{name}}}') for name in ("avx512bf16", "avx512vnni", "avxvnni", "avx2")]
    assert at == sorted(at)
    (tmp_path / "passes.c").write_text(source)
    build([tmp_path / "passes.c"], ("-c",), ".o")  # it is what bundle.h declares


@pytest.mark.slow
def test_passes_for_apple_are_assembly_text(model: Model) -> None:
    """Without the platform's version, which Xcode's assembler adds, and without registers that Apple keeps."""
    layout = make_layout(model.file, model.spec)
    designs = exported_designs(layout, "f16", "aarch64", "ios", isas=["dotprod"])
    (path,) = exported_objects(designs)
    text = path.read_text()
    assert path.suffix == ".s"
    assert "\t.globl\t_edge_run_dotprod\n" in text
    assert "\tbl\t_edge_doze\n" in text
    assert "\tfmla" in text
    assert not re.search(r"movi\.2d\s+v\d+, #0+$", text, re.M)  # of which Xcode's assembler warns, each time
    assert not any(word in text for word in ("DWARF", ".build_version", ".loc", "syscall", "madvise", "x18"))
    called = {line.split()[1] for line in text.splitlines() if line.startswith("\tbl\t")}
    assert called <= {f"_{name}" for name in OUTSIDE} | {"_bzero"} | {
        line[:-1] for line in text.splitlines() if line.endswith(":")
    }


def test_machines_without_exported_passes_are_refused(model: Model) -> None:
    layout = make_layout(model.file, model.spec)
    for machine, system in (("riscv64", "linux"), ("x86_64", "ios")):
        with pytest.raises(UnsupportedError, match=f"no library is made for {system} on {machine}"):
            exported_designs(layout, "f16", machine, system)


def test_code_beside_bf16_is_shared_where_work_is_divided_alike(model: Model) -> None:
    layout = make_layout(model.file, model.spec)
    for tuned, like in (({}, "avx512vnni"), ({"avx512vnni": {"score_rows": 16}}, "")):
        found = exported_designs(layout, "f16", "x86_64", "linux", lambda isa, tuned=tuned: tuned.get(isa, {}))
        assert (found[0].target.name, found[0].like) == ("avx512bf16", like)


def test_only_passes_that_divide_work_alike_share_code(model: Model, tmp_path: Path) -> None:
    layout = make_layout(model.file, model.spec)

    def shared(**tuned: dict[str, int]) -> dict[str, set[str]]:
        designs = exported_designs(layout, "f16", "aarch64", "android", lambda isa: tuned.get(isa, {}))
        return {each.target.name: set(each.shared.values()) for each in designs}

    attention = {f"edge_{name}_neon" for name in ("verify_attend", "chunk_attend", "chunk_embed")}
    steps = {f"edge_step_{name}_dotprod" for name in ("qkv", "output", "gate_up", "down", "head")}
    assert shared() == {"i8mm": attention | steps, "dotprod": attention, "neon": {"edge_chunk_embed_neon"}}
    tuned = shared(i8mm={"step_block": 16})
    assert tuned["i8mm"] == {"edge_chunk_embed_i8mm"}
    assert tuned["dotprod"] == attention
    assert shared(**{isa: {"step_block": 16} for isa in ("i8mm", "dotprod", "neon")}) == shared()
    tied = Small(hidden=32, vocab=1103, heads=1, kv_heads=1, ffn=32, tied=True, types={"": "F16", "token_embd": "Q8_0"})
    halved = open_model(write_small(tmp_path / "model.gguf", tied))
    layout = make_layout(halved.file, halved.spec, halve=True)
    assert shared()["i8mm"] == attention | steps | {"edge_step_estimate_dotprod"}
