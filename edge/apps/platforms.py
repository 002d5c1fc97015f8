"""Write the files of a bundle besides model.edge, for each system: the library or its sources, and a manual."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from edge.apps.archives import ANDROID_ONLY
from edge.apps.bindings import copy_source
from edge.apps.constants import CONSTANTS, constants_header
from edge.apps.library import EARS, GPU, NPU, SHARED, STATIC, make_library, runtime_files
from edge.apps.mini import make_program
from edge.apps.site import write_site
from edge.backends.tvm.compiler.exported import as_assembly, exported_objects, passes_source
from edge.backends.tvm.design import Design
from edge.errors import InputError, UnsupportedError

_HERE = Path(__file__).parent
_RUNTIME = _HERE / "runtime"
_ABIS = {"aarch64": "arm64-v8a", "x86_64": "x86_64"}  # as Android calls machines

Tell = Callable[[float], None]


PACKAGES = {  # of --package: the systems that have each
    "swift": ("ios", "macos", "linux"), "kotlin": ("android", "linux"), "web": ("web",), "c": ("linux", "windows"),
}  # fmt: skip


def package_of(system: str, wanted: str | None) -> str:
    """The package for a system. Raises InputError if there is none of this name, UnsupportedError if not for it."""
    own = "c" if system == "linux" else next(name for name, systems in PACKAGES.items() if system in systems)
    if wanted not in (None, *PACKAGES):
        raise InputError(f"--package {wanted} is unknown: choose {', '.join(PACKAGES)}")
    if wanted is not None and system not in PACKAGES[wanted]:
        raise UnsupportedError(
            f"there is no --package {wanted} for {system}: leave it out, for {own}, or choose another --device"
        )
    return wanted or own


_ABILITIES = {  # by the encoder, of lines of manuals
    "": ("answers",), "eyes": ("answers", "sees"), "sounds": ("answers", "sounds"), "ears": ("hears",),
}  # fmt: skip


def write_platform(
    designs: Sequence[Design], system: str, trusted: str, folder: Path, tell: Tell, *, package: str | None = None,
    others: Sequence[Design] = (), gpu: bool = False, npu: bool = False, encoder: str = "",
    sample: bool = False, peak: int = 0,
) -> Path:  # fmt: skip
    """Write the files of a system. Returns the folder for model.edge, within `folder`.

    package: of PACKAGES. others: designs of another machine, for a second library on Android.

    trusted: the text of trusted.c. gpu, npu: include the code for these. encoder: the part beside the model: ears,
    eyes or sounds. sample: with a project of a chat around the package, for Android Studio or Xcode. peak: bytes that a
    process may hold by the plan, for edge-mini; 0 leaves it out. tell: called with the fraction done.
    Raises EngineError if a compiler fails, MissingExtraError without TVM, UnsupportedError without a C compiler.
    """
    if system == "web":
        return write_site(designs, trusted, folder, tell)
    hears = encoder in ("ears", "sounds")
    if package_of(system, package) == "swift":
        files = [f"{encoder}.edge"] if encoder else []
        sources = [*(GPU.iterdir() if gpu else ()), *(EARS.iterdir() if hears else ())]
        designs = designs if system != "linux" else as_assembly(designs)
        place = _write_swift(designs, {"trusted.c": trusted}, folder, tell, sources, files)
        if not sample:
            shutil.rmtree(folder / "Sample")
        _fit(folder / "README.md", ["sample"] * sample)
        return place
    more = [*(GPU.glob("*.c") if gpu else ()), *(NPU.glob("*.c") if npu else ()), *(EARS.glob("*.c") if hears else ())]
    if system == "android":
        machines = [designs, others] if others else [designs]
        place = _write_android(machines, {"trusted.c": trusted}, folder, tell, sorted(more))
        if sample:
            _copy(_HERE / "kotlin" / "project", folder)
        _fit(folder / "README.md", ["sample"] * sample)
        return place
    write = _write_jvm if package == "kotlin" else _write_windows if system == "windows" else _write_c
    place = write(designs, {"trusted.c": trusted}, folder, tell, sorted(more))
    mini = peak > 0 and system == "linux" and package != "kotlin" and encoder != "ears"
    if mini:
        make_program(folder, designs[0].target.machine, peak)
    if package != "kotlin":
        _copy(_HERE / "c" / ("hears.c" if encoder == "ears" else "example.c"), folder, "example.c")
        _fit(folder / "README.md", (*_ABILITIES[encoder], *["mini"] * mini))
    return place


def _fit(manual: Path, kinds: Collection[str]) -> None:
    """Of lines that begin with [KIND], keep those of a bundle's kinds."""
    found = (re.fullmatch(r"(?:\[(\w+)\] ?)?(.*)", line) for line in manual.read_text(encoding="utf-8").splitlines())
    lines = [each[2] for each in found if each and each[1] in (None, *kinds)]
    manual.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_c(designs: Sequence[Design], tables: dict[str, str], folder: Path, tell: Tell, more: list[Path]) -> Path:
    """edge.h, both libraries and a manual."""
    make_library(designs, folder, designs[0].target.machine, "linux", tables=tables, more=more, progress=tell)
    _copy(_RUNTIME / "edge.h", folder)
    _copy(_HERE / "c" / "README.md", folder)
    return folder


def _write_windows(
    designs: Sequence[Design], tables: dict[str, str], folder: Path, tell: Tell, more: list[Path]
) -> Path:
    """edge.h, the DLL and its import library, and a manual."""
    make_library(designs, folder, designs[0].target.machine, "windows", tables=tables, more=more, progress=tell)
    for path in (_RUNTIME / "edge.h", _HERE / "windows"):
        _copy(path, folder)
    return folder


def _write_android(
    machines: Sequence[Sequence[Design]], tables: dict[str, str], folder: Path, tell: Tell, more: list[Path]
) -> Path:
    """edge/: a library module of Gradle; c/: for native code. machines: the designs of each ABI, the phone's first."""
    kotlin, module, native = _HERE / "kotlin", folder / "edge", folder / "c"
    main = module / "src" / "main"
    native.mkdir()
    for designs in reversed(machines):  # the phone's libedge.a stays
        machine = designs[0].target.machine
        make_library(
            designs, native, machine, "android", tables=tables, more=[*sorted((kotlin / "jni").glob("*.c")), *more],
            exports=["JNI_OnLoad"], progress=tell,
        )  # fmt: skip
        libraries = main / "jniLibs" / _ABIS[machine]
        libraries.mkdir(parents=True)
        (native / SHARED).rename(libraries / SHARED)
    _copy(_RUNTIME / "edge.h", native)
    _copy(kotlin / "README.md", folder)
    _copy(kotlin / "src", main / "kotlin")
    _copy(kotlin / "AndroidManifest.xml", main)
    for name in ("build.gradle.kts", "consumer-rules.pro"):
        _copy(kotlin / name, module)
    assets = main / "assets"
    assets.mkdir()
    return assets


def _write_jvm(designs: Sequence[Design], tables: dict[str, str], folder: Path, tell: Tell, more: list[Path]) -> Path:
    """edge/: the Kotlin API for desktop JVMs as a module of Gradle, with the library among its resources."""
    kotlin, module = _HERE / "kotlin", folder / "edge"
    main, machine = module / "src" / "main", designs[0].target.machine
    resources = main / "resources" / "edge" / "runtime"
    resources.mkdir(parents=True)
    make_library(
        designs, resources, machine, "linux", tables=tables, more=[*sorted((kotlin / "jni").glob("*.c")), *more],
        exports=["JNI_OnLoad"], progress=tell,
    )  # fmt: skip
    (resources / STATIC).unlink()
    (resources / SHARED).rename(resources / f"libedge-{machine}.so")
    _copy(kotlin / "src", main / "kotlin")
    for name in ANDROID_ONLY:
        next(main.rglob(name)).unlink()
    copy_source(kotlin / "jvm.gradle.kts", module / "build.gradle.kts")
    copy_source(kotlin / "JVM.md", folder / "README.md")
    return folder


def _write_swift(
    designs: Sequence[Design], tables: dict[str, str], folder: Path, tell: Tell, more: list[Path], files: list[str]
) -> Path:
    """A Swift package, whose build compiles the runtime and assembles the passes, so that they fit any of Apple's SDKs.
    files: beside model.edge."""
    _copy(_HERE / "swift", folder)
    package, own = folder / "Package.swift", '.copy("model.edge")'
    text = package.read_text(encoding="utf-8")
    package.write_text(text.replace(own, ", ".join([own, *(f'.copy("{each}")' for each in files)])), encoding="utf-8")
    sources = folder / "Sources" / "CEdge"
    for path in filter(Path.is_file, [*runtime_files("*.?"), *more]):
        _copy(path, sources / "include" if path.name == "edge.h" else sources)
    for name, text in {"passes.c": passes_source(designs), CONSTANTS: constants_header(), **tables}.items():
        (sources / name).write_text(text, encoding="utf-8")
    for design, path in zip(designs, exported_objects(designs, tell), strict=True):
        part = f"{design.part}_" * bool(design.part)
        shutil.copy(
            path, sources / f"pass_{part}{design.target.name}.S"
        )  # .s has no list of dependencies, which builds want
    return folder / "Sources" / "EdgeKit"


def _copy(source: Path, folder: Path, name: str | None = None) -> None:
    """A file into a folder, perhaps by another name, or the content of one folder into another."""
    folder.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, folder, copy_function=copy_source, dirs_exist_ok=True)
    else:
        copy_source(source, folder / (name or source.name))
