"""Parts of the C runtime (edge/apps/runtime) as a library that tests call through ctypes."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from conftest import CACHE
from objects import object_of, runtime_flags

from edge.apps.constants import CONSTANTS, constants_header
from edge.apps.library import COMMON, EARS, GPU, NPU, RUNTIME, runtime_files
from edge.types import AnyArray

C_FILES = runtime_files("*.c")
GPU_FILES, NPU_FILES, EARS_FILES = (sorted(folder.glob("*.c")) for folder in (GPU, NPU, EARS))
PROGRAMS = Path(__file__).parent / "runtime"  # of tests, in C
NAMES = {path.name: path for path in (*RUNTIME.rglob("*.c"), *PROGRAMS.glob("*.c"))}
PLATFORM = ("platform.c", "posix.c", "linux.c")  # what it takes from Linux
CHECKED = ("-D_GNU_SOURCE=", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SANITIZE = "EDGE_TEST_SANITIZE"  # environment variable: builds check addresses and undefined behaviour


@lru_cache
def includes() -> tuple[str, ...]:
    """The compiler's options for the runtime's headers, of which constants.h is made here."""
    text = constants_header()
    folder = CACHE / "runtime" / hashlib.sha256(text.encode()).hexdigest()[:24]
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{CONSTANTS}.{os.getpid()}"
    made.write_text(text, encoding="utf-8")
    made.rename(folder / CONSTANTS)
    return (*(f"-I{each}" for each in (*COMMON, EARS, GPU, NPU)), f"-I{folder}")


@lru_cache
def load_runtime(*sources: str | Path) -> ctypes.CDLL:
    """The files of the runtime and of PROGRAMS with these names, and others by their paths, compiled into one library.
    Functions that tests call must not be static."""
    return ctypes.CDLL(str(build(sources, ("-shared", "-fPIC"), ".so")))


def build(
    sources: Sequence[str | Path], flags: Sequence[str] = (), suffix: str = "", compiler: str = "cc",
    libraries: Sequence[str] = ("-lm", "-lpthread", "-ldl"),
) -> Path:  # fmt: skip
    """A library or a program in the tests' cache folder, built if sources have changed. Skips without a compiler."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no C compiler {compiler}")
    paths = [NAMES[each] if isinstance(each, str) else each for each in sources]
    checks = CHECKED[2:] if os.environ.get(SANITIZE) else ()
    symbols = ("-g",) if any(each.startswith("-fsanitize") for each in (*checks, *flags)) else ()
    linked = [each for each in flags if str(each).startswith(("-Wl,", "-l", "-shared", "-static", "/"))]
    compiled = [*runtime_flags([compiler]), "-O1", *symbols, *checks, *includes()]
    compiled += [each for each in flags if each not in (*linked, "-fPIC", "-c")]

    def compile_one(path: Path) -> Path:
        if path.suffix != ".c":
            return path
        return object_of(
            [compiler], compiled, path,
            lambda used, made: subprocess.run([compiler, *used, "-c", path, "-o", made], check=True),
        )  # fmt: skip

    objects = [compile_one(path) for path in paths]
    if "-c" in flags:
        return objects[0]
    command = [compiler, *symbols, *checks, *flags, *map(str, objects), *libraries]
    digest = hashlib.sha256(repr(command).encode())
    for path in paths:
        digest.update(path.read_bytes())
    out = CACHE / "runtime" / f"{digest.hexdigest()[:24]}{suffix}"
    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        made = out.with_name(f"{out.name}.{os.getpid()}")
        subprocess.run([*command, "-o", str(made)], check=True)
        made.rename(out)
    return out


def said_by(*command: object, **more: Any) -> str:
    """What a program printed that ended well. more: arguments of subprocess.run."""
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, timeout=900, **more)
    assert done.returncode == 0, f"{done.stdout[-3000:]} {done.stderr[-3000:]}"
    return done.stdout


def pointer(array: AnyArray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
