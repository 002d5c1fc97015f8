"""The C library of a bundle: compilers, archives, and what a linker and Android's loader ask of it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bundles import bundle_sources, model_of
from conftest import exhaustive
from runtime_library import GPU_FILES, said_by
from shared import made_once

from edge.apps.library import LIBC, LIBDL, LIBM, SHARED, exported, find_toolchain, make_library
from edge.backends.tvm.compiler.exported import exported_designs
from edge.backends.tvm.packing.layout import make_layout
from edge.backends.tvm.targets import choose_target
from edge.errors import InputError, UnsupportedError

MODEL = "llama-gqa-tied"
OURS = choose_target().name if platform.machine() == "x86_64" else "avx2"  # which other bundles have
LIBRARIES = {  # machine, system and instruction set
    "linux": ("x86_64", "linux", OURS), "emulator": ("x86_64", "android", OURS),
    "phone": ("aarch64", "android", "dotprod"),
}  # fmt: skip
EACH = pytest.mark.parametrize("name", ["linux", "emulator", exhaustive("phone")])
PAGE = 16 << 10


def made(name: str, *, gpu: bool = False) -> Path:
    """The folder of a library. gpu: with the files of the GPU's pass."""
    machine, system, isa = LIBRARIES[name]
    if shutil.which(f"{machine.replace('_', '-')}-linux-gnu-gcc") is None and platform.machine() != machine:
        pytest.skip(f"no C compiler for {machine}")
    (trusted,) = (path for path in bundle_sources(MODEL, gpu=gpu)[1] if path.name == "trusted.c")

    def make(folder: Path) -> None:
        model, files = model_of(MODEL), GPU_FILES if gpu else []
        layout = make_layout(model.file, model.spec, halve=True)
        folder.mkdir()
        designs = exported_designs(layout, "f16", machine, system, isas=[isa])
        make_library(designs, folder, machine, system, tables={"trusted.c": trusted.read_text()}, more=files)

    return made_once(make, name, "library", gpu)


@EACH
@pytest.mark.slow
def test_loaders_find_what_they_want_in_the_library(name: str) -> None:
    """Pages of 16 KiB, no relocations in code, no executable stack, and whole pages that are sealed after loading."""
    library = made(name) / SHARED
    segments = re.findall(
        r"^ +([A-Z_]+) +0x(\w+) 0x(\w+) 0x\w+ 0x\w+ 0x(\w+) ([RWE ]{3}) 0x(\w+)$",
        said_by("readelf", "-lW", library),
        re.M,
    )
    loads = [
        (int(at, 16), int(place, 16), flags, int(align, 16))
        for kind, at, place, _, flags, align in segments
        if kind == "LOAD"
    ]
    assert len(loads) >= 2
    assert all((at - place) % PAGE == 0 and align == PAGE for at, place, _, align in loads)
    assert not any("W" in flags and "E" in flags for _, _, flags, _ in loads)
    flags = {kind: flags for kind, _, _, _, flags, _ in segments}
    assert flags["GNU_STACK"] == "RW "
    (end,) = (int(place, 16) + int(size, 16) for kind, _, place, size, _, _ in segments if kind == "GNU_RELRO")
    assert end % PAGE == 0
    dynamic = re.findall(r"^ 0x\w+ \((\w+)\) +(.*)$", said_by("readelf", "-dW", library), re.M)
    tags = {tag for tag, _ in dynamic}
    assert not tags & {"TEXTREL", "INIT", "INIT_ARRAY", "FINI", "FINI_ARRAY", "RPATH", "RUNPATH"}
    assert "Flags: NOW" in {value for tag, value in dynamic if tag == "FLAGS_1"}
    named = {tag: re.findall(r"\[(.*)\]", value) for tag, value in dynamic if tag == "SONAME"}
    assert named == {"SONAME": [SHARED]}
    needed = {re.sub(r".*\[(.*)\]", r"\1", value) for tag, value in dynamic if tag == "NEEDED"}
    assert needed == ({"libc.so.6", "libm.so.6"} if name == "linux" else {"libc.so", "libm.so"})


@EACH
@pytest.mark.slow
def test_library_exports_the_header_and_calls_allowed_functions(name: str) -> None:
    library = made(name) / SHARED
    symbols = [line.split() for line in said_by("nm", "-DP", library).splitlines()]
    assert {name for name, kind, *_ in symbols if kind == "T"} == set(exported())
    undefined = {name.partition("@")[0] for name, kind, *_ in symbols if kind in "Uw"}
    assert undefined <= {*LIBC, *LIBM}
    assert {"mmap", "pthread_create"} <= undefined
    assert "no symbols" in subprocess.run(["nm", library], capture_output=True, text=True).stderr  # stripped


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pass_of_a_gpu_calls_what_bionic_has() -> None:
    """The pass takes 48 KiB at most."""
    with_gpu = made("phone", gpu=True) / SHARED
    undefined = {line.split()[0].partition("@")[0] for line in said_by("nm", "-DPu", with_gpu).splitlines()}
    assert {"dlopen", "dlsym", "uname"} <= undefined <= {*LIBC, *LIBDL, *LIBM}
    without, size = (path.stat().st_size for path in (made("phone") / SHARED, with_gpu))
    assert without < size <= without + (48 << 10)


def test_compiler_for_another_machine_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = find_toolchain(platform.machine(), "linux")
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[platform.machine()]
    monkeypatch.setenv("CC", own.compiler[0])
    monkeypatch.delenv("ANDROID_NDK_HOME", raising=False)
    monkeypatch.setattr("edge.apps.library.sys.executable", str(tmp_path / "no-python"))  # which might have zig
    assert find_toolchain(platform.machine(), "android").compiler == own.compiler
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", own.compiler[0] if own.compiler[0].startswith("/") else "/usr/bin/" + own.compiler[0])
    with pytest.raises(UnsupportedError, match=f"no C compiler for {other}: apt-get install gcc-.*ziglang.*NDK_HOME"):
        find_toolchain(other, "android")
    monkeypatch.delenv("CC")
    with pytest.raises(UnsupportedError, match=r"apt-get install gcc, pip install ziglang, or set CC$"):
        find_toolchain(platform.machine(), "linux")
    with pytest.raises(UnsupportedError, match="a library for ios is built there"):
        find_toolchain("aarch64", "ios")


@pytest.mark.parametrize(("command", "says"), [
    ("no-such-compiler -O2", "CC names the compiler no-such-compiler, which is not there: correct it, or unset CC"),
    ("/", "CC names the compiler /, which is not there"), ("'", "CC is not understood: No closing quotation"),
    ("true", "CC names true, which does not answer"),
    ("false", "CC names false, which does not answer as C compilers do (-dumpmachine): correct it, or unset CC"),
])  # fmt: skip
def test_cc_that_names_no_compiler_is_refused(command: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(InputError) as raised:
        find_toolchain(platform.machine(), "linux")
    assert says in str(raised.value)
    monkeypatch.setenv("CC", " ")
    find_toolchain(platform.machine(), "linux")
