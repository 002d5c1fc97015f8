"""The WebAssembly modules of a site: the runtime and one compiled pass each, linked by zig.

A module imports its memory, which threads share, and a clock and random bits; see web/c/web.h.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edge.apps.constants import constants_header
from edge.apps.library import EARS, Toolchain, compile_sources, run_compiler, runtime_files
from edge.backends.tvm.compiler.exported import exported_objects, passes_source
from edge.backends.tvm.design import Design
from edge.devices.output import work_folder
from edge.errors import MissingExtraError
from edge.storage import cache
from edge.types import Progress

PAGE = 65536  # bytes of a page of WebAssembly memory
MOST_PAGES = 65535  # the size in bytes fits in 32 bits

_SOURCES = Path(__file__).parent / "web" / "c"
NATIVE = ("platform.c", "posix.c", "cpu.c")  # files of the runtime for native systems; _SOURCES has its own platform.c

_FEATURES = "-mcpu=generic+simd128+atomics+bulk_memory+nontrapping_fptoint+sign_ext"
# WASI only for its headers. No contraction to fused multiply-add, as in NumPy.
_COMPILE = (
    "-target", "wasm32-wasi", _FEATURES, "-std=c11", "-Os", "-ffp-contract=off", "-fno-math-errno",
    "-fno-builtin-bcmp", "-fno-sanitize=all", "-w",
)  # fmt: skip
_SMALLEST = ("-Xclang", "-Oz")  # zig's own -Oz is -Os
# Files with loops over a vocabulary, rows, pixels or samples.
_LOOPS = ("sampler", "rows", "pixels", "patches", "project", "mel", "stem", "resample")
_LINK = (
    "-target", "wasm32-freestanding", _FEATURES, "-O2", "-fno-sanitize=all", "-Wl,--no-entry", "-Wl,--import-memory",
    "-Wl,--shared-memory", f"-Wl,--max-memory={MOST_PAGES * PAGE}", "-Wl,--export=__stack_pointer", "-Wl,-s",
    f"-Wl,-z,stack-size={1 << 17}",
)  # fmt: skip


def find_zig() -> Toolchain:
    """Zig, which has a C compiler and a linker for WebAssembly. Raises MissingExtraError if it is not installed."""
    command = (sys.executable, "-m", "ziglang")
    try:
        # Its first start reads 150 MB, which takes long on a busy disk.
        version = subprocess.run([*command, "version"], capture_output=True, text=True, timeout=600, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        raise MissingExtraError("ziglang", "web") from None
    return Toolchain((*command, "cc"), "wasm32", version.strip())


def make_modules(
    designs: Sequence[Design], folder: Path, *, tables: Mapping[str, str], progress: Progress | None = None
) -> list[Path]:
    """Write edge-<instruction set>.wasm for every instruction set of the designs; returns the files.

    tables: names and texts of C files that belong to this bundle, such as trusted.c.
    Raises MissingExtraError without zig or TVM, and EngineError if one of their compilers fails.
    """
    zig = find_zig()
    passes = exported_objects(designs, progress)
    made = list[Path]()
    with work_folder() as work:
        runtime = _runtime_archive(zig)
        for isa in dict.fromkeys(each.target.name for each in designs):
            own = [each for each in zip(designs, passes, strict=True) if each[0].target.name == isa]
            sources = []
            for name, text in {"passes.c": passes_source([design for design, _ in own]), **tables}.items():
                sources.append(work / name)
                sources[-1].write_text(text, encoding="utf-8")
            out = folder / f"edge-{isa}.wasm"
            compiled = compile_sources(zig, (*_COMPILE, *_SMALLEST), sources, work)
            whole = ("-Wl,--whole-archive", runtime, "-Wl,--no-whole-archive")
            run_compiler(zig, *_LINK, *whole, *compiled, *(path for _, path in own), "-o", out)
            out.chmod(0o644)  # the linker makes it executable
            made.append(out)
    return made


def make_own_module(source: Path, out: Path) -> None:
    """Compile a C file to a module with a memory of its own. Raises as `make_modules`."""
    shared = ("--import-memory", "--shared-memory", "--max-memory", "--export=__stack_pointer")
    zig, link = find_zig(), [each for each in _LINK if not each.removeprefix("-Wl,").startswith(shared)]
    with work_folder() as work:
        run_compiler(zig, *link, *compile_sources(zig, (*_COMPILE, "-O2"), [source], work), "-o", out)
    out.chmod(0o644)


def initial_pages(module: bytes) -> int:
    """Initial pages of a module's memory: its data, the first thread's stack. Raises ValueError if it imports none."""
    at = 8  # after the magic number and the version
    while at < len(module):
        kind, at = module[at], at + 1
        size, at = _number(module, at)
        if kind == 2:  # imports
            return _memory_pages(module, at)
        at += size
    raise ValueError("the module imports no memory")


def _memory_pages(module: bytes, at: int) -> int:
    count, at = _number(module, at)
    for _ in range(count):
        for _name in range(2):  # of the module, of the import
            size, at = _number(module, at)
            at += size
        kind, at = module[at], at + 1
        if kind == 2:  # memory: flags, then its limits
            return _number(module, at + 1)[0]
        if kind != 0:  # a function: its type
            raise ValueError("the module imports more than functions and memory")
        _, at = _number(module, at)
    raise ValueError("the module imports no memory")


def _number(module: bytes, at: int) -> tuple[int, int]:
    """An unsigned LEB128 number, and where the next one begins."""
    value = shift = 0
    while True:
        byte, at = module[at], at + 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at


def _runtime_archive(zig: Toolchain) -> Path:
    """The runtime without the bundle's tables as an archive of object files, from the cache."""
    sources = [each for each in runtime_files("*.c") if each.name not in NATIVE]
    sources += sorted(_SOURCES.glob("*.c")) + sorted(EARS.glob("*.c"))  # the linker leaves out what a site cannot use
    digest = hashlib.sha256(repr((zig.version, _COMPILE, _SMALLEST, _LOOPS, constants_header())).encode())
    headers = [*runtime_files("*.h"), *sorted(_SOURCES.glob("*.h")), *sorted(EARS.glob("*.h"))]
    for path in (*headers, *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())

    def compile_runtime(out: Path) -> None:
        with work_folder() as work:
            objects = list[Path]()
            for loops, more in ((False, _SMALLEST), (True, ())):
                some = [each for each in sources if (each.stem in _LOOPS) == loops]
                objects += compile_sources(zig, (*_COMPILE, *more), some, work)
            out.write_bytes(b"!<arch>\n")  # an archive without members
            run_compiler(replace(zig, compiler=(*zig.compiler[:-1], "ar")), "qcD", out, *objects)

    return cache.find_or_make("kernels", digest.hexdigest()[:32], ".a", compile_runtime, about="runtime, wasm32")
