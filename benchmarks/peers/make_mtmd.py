"""Build libmtmd, llama.cpp's encoder of pictures, beside the installed llama-cpp-python, which is built without it.

    python benchmarks/peers/make_mtmd.py [build/mtmd]

Only mtmd is compiled, from the source package of the installed version, and linked with the installed libraries: so
both share ggml's kernels, as its own build has them. Needs pip, a C++ compiler, 90 MB and two minutes of CPU time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

LIBRARIES = ("llama", "ggml", "ggml-base", "ggml-cpu")
INCLUDES = ("include", "ggml/include", "tools/mtmd", "vendor", "vendor/hash", "common", "src")


def make_mtmd(folder: Path) -> Path:
    """The folder of libmtmd.so and of the libraries that it is linked with, as MTMD_CPP_LIB names it."""
    release = version("llama-cpp-python")
    done = folder / f"lib-{release}"
    if (done / "libmtmd.so").exists():
        return done
    folder.mkdir(parents=True, exist_ok=True)
    source = fetch(folder, release)
    done.mkdir(exist_ok=True)
    installed = package() / "lib"
    tool = source / "tools" / "mtmd"
    units = [*tool.glob("models/*.cpp"), *(tool / f"{each}.cpp" for each in UNITS)]
    units += [each for name in VENDORED for each in sorted((source / "vendor" / name).rglob("*.c*"))]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda unit: compile_unit(source, unit, folder), units))
    libraries = [str(installed / f"lib{name}.so") for name in LIBRARIES]
    part, linked = done / "libmtmd.part", (f"-Wl,-rpath,{installed}", "-lpthread")
    run("-shared", "-Wl,--no-undefined", "-o", str(part), *map(str, objects), *libraries, *linked)
    part.rename(done / "libmtmd.so")
    return done


VENDORED = ("hash", "miniaudio", "stb")
UNITS = ("mtmd", "mtmd-audio", "mtmd-image", "mtmd-helper", "mtmd-helper-gen", "clip")


def package() -> Path:
    """The installed package's folder."""
    spec = find_spec("llama_cpp")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def fetch(folder: Path, release: str) -> Path:
    """llama.cpp's source in the package of this release."""
    name = f"llama_cpp_python-{release}"
    archive, source = folder / f"{name}.tar.gz", folder / name / "vendor" / "llama.cpp"
    if not archive.exists():
        wanted = f"llama-cpp-python=={release}"
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*pip, "--dest", folder, wanted], check=True)
    if not source.exists():
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return source


def compile_unit(source: Path, unit: Path, folder: Path, *more: str) -> Path:
    target = folder / f"{unit.parent.name}-{unit.stem}.o"
    if target.exists():
        return target
    as_c = unit.suffix == ".c" and unit.stem != "sha1"  # which is C++ all the same
    language = ["-x", "c"] if as_c else ["-x", "c++", "-std=c++17"]
    flags = ["-O2", "-fPIC", "-w", "-DLLAMA_SHARED", "-DGGML_SHARED", *(f"-I{source / each}" for each in INCLUDES)]
    part = target.with_suffix(".part")
    run(*language, *flags, *more, "-c", str(unit), "-o", str(part))
    part.rename(target)
    return target


def run(*arguments: str) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("no C++ compiler: install g++")
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])


if __name__ == "__main__":
    print(make_mtmd(Path(sys.argv[1] if len(sys.argv) > 1 else "build/mtmd")))
