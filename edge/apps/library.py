"""The C library of a bundle: the runtime and the compiled passes as libedge.a and libedge.so, made by a C compiler; for
Windows as edge.dll with edge.lib.

For Android no NDK is needed: the runtime calls only functions whose ABI is the same in glibc and bionic, so any Linux
compiler for that machine will do. It links against stubs of libc.so, libm.so and libdl.so that have these functions
and no others.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from edge.apps.constants import CONSTANTS, constants_header
from edge.backends.tvm.compiler.exported import exported_objects, passes_source
from edge.backends.tvm.design import Design
from edge.devices.host import usable_cores
from edge.devices.output import work_folder
from edge.errors import EngineError, InputError, UnsupportedError
from edge.records import dataclass
from edge.storage import cache
from edge.types import Progress

STATIC, SHARED = "libedge.a", "libedge.so"
DLL, IMPORTS = "edge.dll", "edge.lib"  # Windows: both GNU's and Microsoft's linkers find edge.lib
RUNTIME = Path(__file__).parent / "runtime"
# Folders of C files that every bundle has, and those of bundles that run on GPUs, on NPUs, that hear.
_SUBJECTS = (
    "budgets", "drafting", "eyes", "grammar", "kv", "model", "pass", "sampling", "session", "system", "text", "tools",
)  # fmt: skip
COMMON = (RUNTIME, *(RUNTIME / each for each in _SUBJECTS))
GPU, NPU, EARS = RUNTIME / "gpu", RUNTIME / "npu", RUNTIME / "ears"

# The external functions that a library may call on Android: their arguments and results are numbers and pointers, and
# mean the same in glibc's headers and in bionic's. (sysconf's do not.)
LIBC = (
    "mmap", "munmap", "madvise", "open", "close", "fcntl", "read", "write", "pread", "lseek", "getpid", "memcpy",
    "memmove", "memset", "memcmp", "memchr", "strlen", "strcmp", "pthread_create", "pthread_join", "clock_gettime",
    "nanosleep", "sched_setaffinity", "sched_getaffinity", "getauxval", "rename", "unlink",
    "uname", "access", "strchr", "strcpy", "strspn", "strcspn",
)  # fmt: skip
LIBDL = ("dlopen", "dlsym")
LIBM = tuple(
    f"{name}{kind}"
    for name in ("exp", "log", "log1p", "cos", "sin", "sincos", "sqrt", "floor", "ceil", "rint", "fmax", "fmin")
    for kind in ("", "f")
)

# No contraction to fused multiply-add, as in NumPy. Symbol and unwind tables would serve debuggers only.
_COMPILE = (
    "-std=c11", "-Os", "-fPIC", "-fvisibility=hidden", "-ffunction-sections", "-fdata-sections", "-ffp-contract=off",
    "-fno-math-errno", "-fno-builtin-bcmp", "-fno-stack-protector", "-fno-asynchronous-unwind-tables",
    "-U_FORTIFY_SOURCE", "-w",
)  # fmt: skip
_MACHINE = {  # x18 is reserved on Android; atomics are inline, without a library
    "aarch64": ("-ffixed-x18", "-mno-outline-atomics"),
    "x86_64": ("-fcf-protection=none",),
}
_LINK = (
    "-shared", "-nostartfiles", "-s", "-Wl,--gc-sections", "-Wl,--as-needed", "-Wl,--no-undefined",
    "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-z,relro", "-Wl,-z,now",
    "-Wl,-z,max-page-size=16384", "-Wl,-z,common-page-size=16384",
)  # fmt: skip


# Reproducible: no timestamp, and a fixed base address instead of one derived from the path. Windows has all other
# libraries.
_LINK_DLL = (
    "-shared", "-s", "-static-libgcc", "-Wl,--gc-sections", "-Wl,--no-insert-timestamp", "-Wl,--image-base=0x180000000",
)  # fmt: skip

_GNU_LINK = ("-Wl,-z,noseparate-code",)  # as LLVM's linker does anyway: fewer segments, and less padding between them


_MINGW = "w64-mingw32"  # the system's name in MinGW's target triples


@dataclass(frozen=True)
class Toolchain:
    """A C compiler."""

    compiler: tuple[str, ...]  # its command, with the options that select the machine
    target: str  # the target triple that it reports, such as x86_64-linux-gnu
    version: str  # as it reports it

    @property
    def bionic(self) -> bool:
        """Whether it links against bionic, Android's C library."""
        return "android" in self.target

    def compiles_for(self, machine: str, system: str) -> bool:
        found = _MINGW if system == "windows" else "linux"
        return self.target.startswith(machine) and found in self.target and (system == "android" or not self.bionic)


def find_toolchain(machine: str, system: str) -> Toolchain:
    """A C compiler for Linux or Android on x86_64 or aarch64: $CC, the NDK's, this machine's, a cross compiler, or zig;
    for Windows $CC or MinGW.

    Raises UnsupportedError, with the package to install, if none is found, and InputError if $CC names no compiler.
    """
    if system not in ("linux", "android", "windows"):
        raise UnsupportedError(f"a library for {system} is built there, from the sources in the bundle")
    for command in _compilers(machine, system):
        toolchain = _ask(command) if shutil.which(command[0]) else None
        if toolchain is not None and toolchain.compiles_for(machine, system):
            return toolchain
    if system == "windows":
        package = f"gcc-mingw-w64-{machine.replace('_', '-')}"
        raise UnsupportedError(f"no C compiler for Windows: apt-get install {package}, or set CC to one of MinGW")
    package = "gcc" if machine == platform.machine() else f"gcc-{machine.replace('_', '-')}-linux-gnu"
    raise UnsupportedError(
        f"no C compiler for {machine}: apt-get install {package}, pip install ziglang, or set CC"
        + (" or ANDROID_NDK_HOME" if system == "android" else "")
    )


def make_library(
    designs: Sequence[Design], folder: Path, machine: str, system: str, *, tables: Mapping[str, str] | None = None,
    more: Sequence[Path] = (), exports: Sequence[str] = (), progress: Progress | None = None,
) -> None:  # fmt: skip
    """Write libedge.a and libedge.so, or edge.dll and edge.lib, into the folder.

    tables: names and texts of C files that belong to this bundle, such as trusted.c. more: further C files, such as a
    binding's, whose folders are searched for headers. exports: functions of theirs that the shared library exports
    besides those of edge.h.
    Raises UnsupportedError without a C compiler for the machine, EngineError if it or TVM's compiler fails, and
    MissingExtraError without TVM.
    """
    toolchain = find_toolchain(machine, system)
    objects = exported_objects(designs, progress)
    with work_folder() as work:
        tables = {"passes.c": passes_source(designs), **(tables or {})}
        for name, text in tables.items():
            (work / name).write_text(text, encoding="utf-8")
        (work / "map").write_text(
            f"{{ global: {' '.join(f'{each};' for each in (*exported(), *exports))} local: *; }};\n"
        )
        made = compile_sources(toolchain, (*_COMPILE, *_MACHINE[machine]), [work / name for name in tables], work)
        if system == "windows":
            runtime = _runtime_object(toolchain, machine, more)
            (work / "edge.def").write_text("\n".join(["EXPORTS", *exported(), *exports, ""]))
            run_compiler(
                toolchain, *_LINK_DLL, runtime, *made, *objects, work / "edge.def", "-lsynchronization",
                f"-Wl,--out-implib,{folder / IMPORTS}", "-o", folder / DLL,
            )  # fmt: skip
            return
        _join(toolchain, [_runtime_object(toolchain, machine, more), *made, *objects], work / "edge.o")
        (folder / STATIC).write_bytes(archive("edge.o", (work / "edge.o").read_bytes(), [*exported(), *exports]))
        link: list[str | Path] = [
            *_LINK,
            f"-Wl,-soname,{SHARED}",
            f"-Wl,--version-script={work / 'map'}",
            work / "edge.o",
        ]
        if "clang" not in toolchain.version:
            link += _GNU_LINK
        if system == "android" and not toolchain.bionic:
            link += ["-nostdlib", *_stubs(toolchain, work)]
        else:
            link += ["-lm", "-ldl", "-pthread"]
        run_compiler(toolchain, *link, "-o", folder / SHARED)


def runtime_files(pattern: str) -> list[Path]:
    """The files of the runtime that every bundle has."""
    return sorted(path for folder in COMMON for path in folder.glob(pattern))


def exported() -> list[str]:
    """The functions of edge.h."""
    header = (RUNTIME / "edge.h").read_text(encoding="utf-8")
    return re.findall(r"^EDGE_API [\w ]+?\*?(edge_\w+)\(", header, re.MULTILINE)


def archive(name: str, member: bytes, symbols: Sequence[str]) -> bytes:
    """A static library of one object file that defines these symbols, in System V's format, without timestamps."""

    def entry(title: str, content: bytes) -> bytes:
        header = f"{title:<16}{0:<12}{0:<6}{0:<6}{'644':<8}{len(content):<10}`\n"
        return header.encode() + content + b"\n" * (len(content) % 2)

    names = b"".join(symbol.encode() + b"\0" for symbol in symbols)
    index_size = 4 + 4 * len(symbols) + len(names)
    place = 8 + 60 + index_size + index_size % 2  # of the member's header
    index = len(symbols).to_bytes(4, "big") + place.to_bytes(4, "big") * len(symbols) + names
    return b"!<arch>\n" + entry("/", index) + entry(f"{name}/", member)


def _compilers(machine: str, system: str) -> Iterator[list[str]]:
    if own := os.environ.get("CC", "").strip():
        yield _named(own)
    if system == "windows":
        yield [f"{machine}-{_MINGW}-gcc"]
        return
    ndk = os.environ.get("ANDROID_NDK_HOME")
    if ndk and system == "android":
        for host in sorted(Path(ndk, "toolchains", "llvm", "prebuilt").glob("*")):
            yield [str(host / "bin" / "clang"), f"--target={machine}-linux-android26"]
    if machine == platform.machine():
        yield from (["cc"], ["gcc"], ["clang"])
    yield [f"{machine.replace('_', '-')}-linux-gnu-gcc"]
    yield [f"{machine}-linux-gnu-gcc"]
    yield [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu"]


def _named(command: str) -> list[str]:
    """$CC, split into arguments. Raises InputError if it names no compiler."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise InputError(f"CC is not understood: {error}") from None
    if not shutil.which(words[0]):
        raise InputError(f"CC names the compiler {words[0]}, which is not there: correct it, or unset CC")
    if _ask(words) is None:
        raise InputError(
            f"CC names {words[0]}, which does not answer as C compilers do (-dumpmachine): correct it, or unset CC"
        )
    return words


def _ask(command: Sequence[str]) -> Toolchain | None:
    """Ask a compiler for its target and version; None if it does not answer."""
    try:
        target, version = (
            subprocess.run([*command, option], capture_output=True, text=True, timeout=60, check=True).stdout
            for option in ("-dumpmachine", "--version")
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return Toolchain(tuple(command), target, version) if target.strip() else None


def compile_sources(toolchain: Toolchain, flags: Sequence[str], sources: Sequence[Path], folder: Path) -> list[Path]:
    """Object files of C files, in `folder`, where constants.h is written. It and the files' folders are searched for
    headers. Raises EngineError if the compiler fails."""
    (folder / CONSTANTS).write_text(constants_header(), encoding="utf-8")

    includes = [f"-I{each}" for each in dict.fromkeys((*COMMON, folder, *(source.parent for source in sources)))]

    def compile_one(source: Path) -> Path:
        out = folder / f"{source.stem}.o"
        run_compiler(toolchain, *flags, *includes, "-c", source, "-o", out)
        return out

    with ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(compile_one, sources))


def _join(toolchain: Toolchain, objects: Sequence[Path], out: Path) -> None:
    """Join object files into one (ld -r)."""
    run_compiler(toolchain, "-r", "-nostdlib", "-Wl,--strip-debug", *objects, "-o", out)


def _runtime_object(toolchain: Toolchain, machine: str, more: Sequence[Path]) -> Path:
    """The runtime without the bundle's tables as one object file, from the cache."""
    headers = sorted({header for folder in {*COMMON, *(path.parent for path in more)} for header in folder.glob("*.h")})
    flags = (*_COMPILE, *_MACHINE[machine])
    return cached_object(toolchain, flags, [*runtime_files("*.c"), *more], f"runtime, {machine}", headers)


def cached_object(
    toolchain: Toolchain, flags: Sequence[str], sources: Sequence[Path], about: str, headers: Sequence[Path],
    texts: Mapping[str, str] | None = None,
) -> Path:  # fmt: skip
    """C files as one object file, from the cache. about: a description for people. headers: which they include; texts:
    of such headers, by name. Raises EngineError if the compiler fails."""
    texts = texts or {}
    digest = hashlib.sha256(repr((toolchain.version, toolchain.compiler[1:], flags, constants_header())).encode())
    for path in (*headers, *sources):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update("".join(texts.values()).encode())

    def compile_all(out: Path) -> None:
        with work_folder() as work:
            for name, text in texts.items():
                (work / name).write_text(text, encoding="utf-8")
            _join(toolchain, compile_sources(toolchain, flags, sources, work), out)

    return cache.find_or_make("kernels", digest.hexdigest()[:32], ".o", compile_all, about=about)


def link_program(
    toolchain: Toolchain, objects: Sequence[Path], library: Path, program: Path, *, static: bool = True
) -> None:
    """Link a program for Linux, which if static needs no library of its system. With zig, use musl, which links
    statically. Raises EngineError if the linker fails, as without a static C library."""
    words = [each.replace("-linux-gnu", "-linux-musl") for each in toolchain.compiler]
    chosen = replace(toolchain, compiler=tuple(words)) if static and "ziglang" in words else toolchain
    kind = ["-static"] if static else []
    run_compiler(
        chosen, *kind, "-s", "-pthread", *objects, library, "-lm", "-Wl,--gc-sections,--build-id=none", "-o", program
    )


def _stubs(toolchain: Toolchain, folder: Path) -> list[Path]:
    """Shared libraries without code that stand in for Android's during linking."""
    made = []
    for name, functions in (("libc.so", LIBC), ("libm.so", LIBM), ("libdl.so", LIBDL)):
        source = folder / f"{name}.s"
        source.write_text("".join(f".globl {each}\n.type {each}, %function\n{each}:\n" for each in functions))
        run_compiler(toolchain, "-shared", "-nostdlib", f"-Wl,-soname,{name}", source, "-o", folder / name)
        made.append(folder / name)
    return made


def run_compiler(toolchain: Toolchain, *arguments: str | Path) -> str:
    """Run the compiler and return its output. Raises EngineError if it fails."""
    command = [*toolchain.compiler, *map(str, arguments)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise EngineError(f"the C compiler {toolchain.compiler[0]} cannot be run: {error.strerror}") from None
    if done.returncode:
        said = done.stderr.splitlines() or ["it does not say why"]
        why = next((line for line in said if "error" in line or "undefined" in line), said[0])
        raise EngineError(f"the C compiler {toolchain.compiler[0]} failed: {why}")
    return done.stdout
