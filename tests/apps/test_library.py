"""The C library of a bundle: compilers, archives, and what a linker and Android's loader ask of it."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import open_golden
from runtime_library import C_FILES, WARNINGS, build, includes

pytest.importorskip("tvm_ffi")

from edge.apps.library import (
    GPU,
    LIBC,
    LIBDL,
    LIBM,
    SHARED,
    STATIC,
    exported,
    find_toolchain,
    make_library,
)  # fmt: skip
from edge.backends.tvm.compiler.exported import exported_designs, exported_objects, passes_source
from edge.backends.tvm.packing.layout import make_layout
from edge.errors import InputError, UnsupportedError
from edge.model.model import Model

TABLES = {
    "trusted.c": '#include "bundle.h"\n#include "calling.h"\n'
    "const uint8_t EDGE_TRUSTED[32] = {0};\ntable_reader *const EDGE_TABLE = NULL;\n"
    "adapter_reader *const EDGE_ADAPTERS = NULL;\n"
    "piece_splitter *const EDGE_PIECES = NULL;\ntext_composer *const EDGE_COMPOSER = NULL;\n"
    "embedder *const EDGE_EMBED = NULL;\n"
    "const ears_kind *const EDGE_EARS = NULL;\n"
    "const tools_kind *const EDGE_TOOLS = NULL;\n"
    "const eyes_kind *const EDGE_EYES = NULL;\nconst encoder_kind *const EDGE_SEES = NULL;\n"
    "const sounds_kind *const EDGE_SOUNDS = NULL;\n"
    "const drafter_kind *const EDGE_DRAFTER = NULL;\nconst encoder_kind *const EDGE_DRAFTS = NULL;\n"
    "const accelerator_kind *const EDGE_GPU = NULL, *const EDGE_NPU = NULL, *const EDGE_PAGE = NULL;\n"
    "session_racer *const EDGE_RACE = NULL;\n"
}
OPENING = r"""
#include <stdio.h>
#include "edge.h"
int main(void)
{
    edge_source source = {sizeof source, "no-such-file", -1, 0, 0};
    edge_error error = {.size = sizeof error};
    edge_model *model;
    edge_status status = edge_open(&source, &model, &error);
    printf("%d %s\n", status, error.message);
    return 0;
}
"""
WITH_GPU = (
    TABLES["trusted.c"].replace("EDGE_GPU = NULL", "EDGE_GPU = &edge_gpu").replace("RACE = NULL", "RACE = begin_faster")
)
SYSTEMS = ["linux", "android"]
PAGE = 16 << 10


def make(
    model: Model, folder: Path, system: str, *isas: str, kv_dtype: str = "f16", gpu: bool = False, **more: str
) -> Path:
    """A library for x86-64 Linux or ARM64 Android. gpu: with the files of the GPU's pass."""
    machine = {"linux": "x86_64", "android": "aarch64"}[system]
    if shutil.which(f"{machine.replace('_', '-')}-linux-gnu-gcc") is None and platform.machine() != machine:
        pytest.skip(f"no C compiler for {machine}")
    layout = make_layout(model.file, model.spec, halve=True)
    designs = exported_designs(layout, kv_dtype, machine, system, isas=isas or None)
    folder.mkdir()
    files = sorted(GPU.glob("*.c")) if gpu else []
    make_library(designs, folder, machine, system, tables=TABLES | more, more=files)
    return folder


def ask(program: str, *arguments: str | Path) -> str:
    return subprocess.run([program, *arguments], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Libraries with one instruction set."""
    model, folder = open_golden("llama-gqa-tied").model, tmp_path_factory.mktemp("libraries")
    isas = {"linux": "avx2", "android": "dotprod"}
    return {system: make(model, folder / system, system, isas[system]) for system in SYSTEMS}


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_loaders_find_what_they_want_in_the_library(made: dict[str, Path], system: str) -> None:
    """Pages of 16 KiB, no relocations in code, no executable stack, and whole pages that are sealed after loading."""
    library = made[system] / SHARED
    segments = re.findall(
        r"^ +([A-Z_]+) +0x(\w+) 0x(\w+) 0x\w+ 0x\w+ 0x(\w+) ([RWE ]{3}) 0x(\w+)$", ask("readelf", "-lW", library), re.M
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
    dynamic = re.findall(r"^ 0x\w+ \((\w+)\) +(.*)$", ask("readelf", "-dW", library), re.M)
    tags = {tag for tag, _ in dynamic}
    assert not tags & {"TEXTREL", "INIT", "INIT_ARRAY", "FINI", "FINI_ARRAY", "RPATH", "RUNPATH"}
    assert "Flags: NOW" in {value for tag, value in dynamic if tag == "FLAGS_1"}
    named = {tag: re.findall(r"\[(.*)\]", value) for tag, value in dynamic if tag == "SONAME"}
    assert named == {"SONAME": [SHARED]}
    needed = {re.sub(r".*\[(.*)\]", r"\1", value) for tag, value in dynamic if tag == "NEEDED"}
    assert needed == ({"libc.so", "libm.so"} if system == "android" else {"libc.so.6", "libm.so.6"})


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_library_exports_the_header_and_calls_allowed_functions(made: dict[str, Path], system: str) -> None:
    library = made[system] / SHARED
    symbols = [line.split() for line in ask("nm", "-DP", library).splitlines()]
    assert {name for name, kind, *_ in symbols if kind == "T"} == set(exported())
    undefined = {name.partition("@")[0] for name, kind, *_ in symbols if kind in "Uw"}
    assert undefined <= {*LIBC, *LIBM}
    assert {"mmap", "pthread_create"} <= undefined
    assert "no symbols" in subprocess.run(["nm", library], capture_output=True, text=True).stderr  # stripped


@pytest.mark.exhaustive
@pytest.mark.slow
def test_pass_of_a_gpu_calls_what_bionic_has(tmp_path: Path, made: dict[str, Path]) -> None:
    """And takes 48 KiB at most."""
    model, tables = open_golden("llama-gqa-tied").model, {"trusted.c": WITH_GPU}
    folder = make(model, tmp_path / "gpu", "android", "dotprod", gpu=True, **tables)
    undefined = {line.split()[0].partition("@")[0] for line in ask("nm", "-DPu", folder / SHARED).splitlines()}
    assert {"dlopen", "dlsym", "uname"} <= undefined <= {*LIBC, *LIBDL, *LIBM}
    without, size = (path.stat().st_size for path in (made["android"] / SHARED, folder / SHARED))
    assert without < size <= without + (48 << 10)


@pytest.mark.slow
def test_archive_is_all_that_a_program_needs(tmp_path: Path, made: dict[str, Path]) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the program runs on x86-64")
    (tmp_path / "main.c").write_text(OPENING)
    said = ask(str(build([tmp_path / "main.c", made["linux"] / STATIC])))
    assert said.startswith("-2 ")
    assert "no-such-file" in said
    assert ".debug" not in ask("readelf", "-SW", made["linux"] / STATIC)


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


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-compiler -O2", "CC names the compiler no-such-compiler, which is not there: correct it, or unset CC"),
        ("/", "CC names the compiler /, which is not there"), ("'", "CC is not understood: No closing quotation"),
        ("true", "CC names true, which does not answer"),
        ("false", "CC names false, which does not answer as C compilers do (-dumpmachine): correct it, or unset CC"),
    ],
)  # fmt: skip
def test_compiler_that_is_named_must_be_one(command: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", command)
    with pytest.raises(InputError) as raised:
        find_toolchain(platform.machine(), "linux")
    assert says in str(raised.value)
    monkeypatch.setenv("CC", " ")
    find_toolchain(platform.machine(), "linux")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_apple_library_calls_public_functions_only(tmp_path: Path) -> None:
    """By zig, which has Apple's headers and a linker of Mach-O."""
    pytest.importorskip("ziglang", reason="pip install ziglang")
    model = open_golden("llama-gqa-tied").model
    designs = exported_designs(make_layout(model.file, model.spec), "f16", "aarch64", "ios")
    (tmp_path / "passes.c").write_text(passes_source(designs))
    (tmp_path / "trusted.c").write_text(WITH_GPU)
    sources = [*C_FILES, *GPU.glob("*.c"), *tmp_path.glob("*.c"), *exported_objects(designs)]
    library = tmp_path / "libedge.dylib"
    ask(
        sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos", "-std=c11", *WARNINGS, *includes(),
        f"-I{GPU}", "-Os", "-dynamiclib", *sources, "-o", library,
    )  # fmt: skip
    called = set(re.findall(r"\b_(\w+)$", ask("llvm-objdump", "--macho", "--bind", "--lazy-bind", library), re.M))
    assert {"mmap", "pthread_create", "dlsym"} <= called
    assert called <= {
        *LIBC, *LIBDL, *LIBM, "sysctlbyname", "arc4random_buf", "getpagesize", "bzero", "__error", "__memcpy_chk",
        "__sincos_stret", "pthread_cond_broadcast", "pthread_cond_init", "pthread_cond_wait", "pthread_mutex_init",
        "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_set_qos_class_self_np", "task_info", "mach_task_self_",
    }  # fmt: skip
