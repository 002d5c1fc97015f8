"""C files that tests compile are compiled once for the same options, whatever library, kit or program they go into.

In `make test` they are compiled without optimizations, which are more than half of what compiling costs, and files of
libraries as those of harnesses: with warnings, and with functions that tests can call.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from quick_code import QUICK

from edge.storage.lock import file_lock

OBJECTS = "EDGE_TEST_OBJECTS"  # environment variable: their folder, which children inherit
WARNINGS = ("-Wall", "-Wextra", "-Wconversion", "-Wno-sign-conversion", "-Wshadow", "-Werror")


def runtime_flags(compiler: Sequence[str]) -> list[str]:
    """Options of the runtime's files in tests: of a library, but for these."""
    from edge.apps.library import _COMPILE, _MACHINE

    left_out, machine = ("-Os", "-fvisibility=hidden", "-w"), platform.machine() if [*compiler] == ["cc"] else ""
    return [*(each for each in _COMPILE if each not in left_out), *_MACHINE.get(machine, ()), *WARNINGS]


def share_objects() -> None:
    """Also those of `edge export` and `edge profile --on kit:DIR`, in this process."""
    from edge.apps import library

    plain = library.run_compiler

    def run(toolchain: library.Toolchain, *arguments: str | Path) -> str:
        if OBJECTS not in os.environ or len(arguments) < 4 or arguments[-4] != "-c":
            return plain(toolchain, *arguments)
        source, out, flags = Path(arguments[-3]), Path(arguments[-1]), list(map(str, arguments[:-4]))
        own = [*library._COMPILE, *library._MACHINE.get(platform.machine(), ())]
        if os.environ.get(QUICK) == "1" and toolchain.compiler == ("cc",) and flags[: len(own)] == own:
            flags[: len(own)] = runtime_flags(toolchain.compiler)
        made = object_of(
            toolchain.compiler, flags, source, lambda flags, made: plain(toolchain, *flags, "-c", source, "-o", made)
        )
        shutil.copyfile(made, out)
        return ""

    library.run_compiler = run


def object_of(
    compiler: Sequence[str], flags: Sequence[str], source: Path, make: Callable[[list[str], Path], object]
) -> Path:
    """A file of the cache, which make(flags, path) writes if it is not there. Without definitions (-D) of names that
    neither the file nor a header mentions, so that more share it; those of the system's headers (_GNU_SOURCE) stay."""
    folders = (source.parent, *dict.fromkeys(Path(each[2:]) for each in flags if each.startswith("-I")))
    files = sorted((_read(*each) for each in _included(source, folders)), key=itemgetter(0))
    if os.environ.get(QUICK) == "1" and ("-Oz" in flags or not any("wasm32" in each for each in flags)):
        # Of WebAssembly those without loops: the others are slow without -O.
        flags = [*(each for each in flags if each not in ("-Xclang", "-Oz") and not each.startswith("-O")), "-O0"]
    used = [
        each for each in flags
        if not each.startswith("-D") or each.startswith("-D_")
        or any(each[2:].partition("=")[0] in names for _, names, _ in files)
    ]  # fmt: skip
    plain = [each for each in used if not each.startswith("-I")]
    key = repr((list(compiler), _version(tuple(compiler)), plain, source.name, [digest for digest, *_ in files]))
    digest = hashlib.sha256(key.encode()).hexdigest()[:32]
    kept = Path(os.environ[OBJECTS]) / f"{digest}.o"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(kept.with_suffix(".lock")):  # another worker may be compiling it
            if not kept.exists():
                made = kept.with_name(f"{digest}-{os.getpid()}.o")
                make(used, made)
                made.rename(kept)
    return kept


@lru_cache(None)
def _version(compiler: tuple[str, ...]) -> str:
    """As a compiler reports it: what another one compiled may not fit its libraries, such as those of sanitizers."""
    return subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout


def _included(path: Path, folders: Sequence[Path]) -> set[tuple[Path, int]]:
    """A file and all that it includes of these folders, with the times of their last changes."""
    found, left = set[tuple[Path, int]](), [path]
    while left:
        file = left.pop()
        if (known := (file, file.stat().st_mtime_ns)) not in found:
            found.add(known)
            for name in _read(*known)[2]:
                left += [each / name for each in (file.parent, *folders) if (each / name).exists()][:1]
    return found


@lru_cache(None)
def _read(path: Path, _changed: int) -> tuple[str, frozenset[str], tuple[str, ...]]:
    """A file's name and digest, the names in it, and the files that it includes."""
    text = path.read_text(encoding="utf-8")
    digest = f"{path.name} {hashlib.sha256(text.encode()).hexdigest()}"
    included = re.findall(r'^ *# *include "([^"]+)"', text, re.MULTILINE)
    return digest, frozenset(re.findall(r"\w+", text)), tuple(included)
