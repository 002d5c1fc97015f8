"""Passes for apps: object files with C functions for several instruction sets, which compute as the engine's own."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import open_golden
from runtime_library import build

pytest.importorskip("tvm_ffi")

from edge.backends.tvm.compiler import exported
from edge.backends.tvm.compiler.exported import exported_designs, exported_objects, passes_source
from edge.backends.tvm.design import Design
from edge.backends.tvm.packing.layout import make_layout
from edge.devices.memory import MemoryLimit, memory_use
from edge.errors import UnsupportedError
from edge.model.model import Model

# The functions that a pass may call.
OUTSIDE = {"edge_doze", "edge_wake", "edge_now", "edge_worked", "memset", "memcpy", "memmove"}


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
    at_once, told = list[int](), list[bool]()
    monkeypatch.setattr(exported, "ThreadPoolExecutor", lambda most: at_once.append(most) or ThreadPoolExecutor(most))
    monkeypatch.setattr(exported, "exported_object", lambda *_, frugal: told.append(frugal) or Path("made"))
    monkeypatch.setattr(exported, "usable_cores", lambda: 4)
    monkeypatch.setattr(exported, "memory_limit", lambda: MemoryLimit(memory_use().rss + free, "free memory"))
    exported_objects(designs)
    assert (at_once, told) == ([1 if frugal else 2], [frugal] * len(designs))


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


def test_only_passes_that_divide_work_alike_share_code(model: Model) -> None:
    layout = make_layout(model.file, model.spec)

    def shared(**tuned: dict[str, int]) -> dict[str, set[str]]:
        designs = exported_designs(layout, "f16", "aarch64", "android", lambda isa: tuned.get(isa, {}))
        return {each.target.name: set(each.shared.values()) for each in designs}

    attention = {f"edge_{name}_neon" for name in ("verify_attend", "chunk_embed")}
    chunks = attention | {"edge_chunk_attend_neon"}
    steps = {f"edge_step_{name}_dotprod" for name in ("qkv", "output", "gate_up", "down", "head")}
    assert shared() == {"i8mm": attention | steps, "dotprod": chunks, "neon": {"edge_chunk_embed_neon"}}
    tuned = shared(i8mm={"step_block": 16})
    assert (tuned["i8mm"], tuned["dotprod"]) == ({"edge_chunk_embed_i8mm"}, chunks)
    in_bytes = exported_designs(layout, "int8", "x86_64", "linux", None, ["avxvnni", "avx2"])[0].shared
    assert set(in_bytes.values()) == {"edge_chunk_attend_avx2", "edge_chunk_embed_avx2"}  # its steps are its own
