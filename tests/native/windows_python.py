"""A Python for Windows that Wine runs, with the packages of the native engine, in a folder: 5 seconds and 450 MB.

    python tests/native/windows_python.py build/windows

No registry that tests may use has Python's own installer. Panda3D's wheel holds the interpreter and its extension
modules, as python.org builds them. The rest of the standard library is that of the Python that runs this.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

COMPILER = "x86_64-w64-mingw32-gcc"
PACKAGES = (
    "panda3d==1.10.16", "numpy==1.26.4",  # NumPy 2 calls functions that Wine 8 lacks
    "psutil==7.2.2", "gguf==0.19.0", "typer==0.28.0", "rich==15.0.0", "tokenizers==0.23.3", "minijinja==3.1.0",
    "platformdirs==4.14.8", "colorama==0.4.6",
    "apache-tvm==0.27.0.post1", "apache-tvm-ffi==0.1.14.post1",
)  # fmt: skip
PROGRAM = """
#include <windows.h>
typedef int (*main_function)(int, wchar_t **);
int wmain(int argc, wchar_t **argv)
{
    HMODULE library = LoadLibraryW(L"LIBRARY.dll");
    return library ? ((main_function)(void *)GetProcAddress(library, "Py_Main"))(argc, argv) : 99;
}
"""
# What Rust's standard library wants of a DLL that Wine 8 lacks.
RANDOM = """
#include <windows.h>
#include <ntsecapi.h>
__declspec(dllexport) BOOL WINAPI ProcessPrng(PBYTE data, SIZE_T size) { return RtlGenRandom(data, size); }
"""


def main(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    packages, extensions, wheels = folder / "Lib/site-packages", folder / "DLLs", folder / "wheels"
    for each in (packages, extensions, wheels):
        each.mkdir(parents=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(wheels),
         "--platform", "win_amd64", "--python-version", version, "--only-binary", ":all:", *PACKAGES],
        check=True,
    )  # fmt: skip
    name = f"python{version.replace('.', '')}"
    for wheel in wheels.iterdir():
        with zipfile.ZipFile(wheel) as archive:
            if not wheel.name.startswith("panda3d-"):
                archive.extractall(packages)
                continue
            for each in archive.namelist():
                file = Path(each)
                if file.parts[0] != "deploy_libs" or file.name.startswith(("api-ms-", "tcl", "tk", "sqlite")):
                    continue
                beside = file.name.lower() in (f"{name}.dll", "vcruntime140.dll")
                ((folder if beside else extensions) / file.name).write_bytes(archive.read(each))
    shutil.rmtree(wheels)
    standard = Path(os.__file__).parent
    for each in standard.iterdir():
        if each.name not in ("site-packages", "lib-dynload", "__pycache__", "test"):
            (folder / "Lib" / each.name).symlink_to(each)
    build(folder / "python.exe", PROGRAM.replace("LIBRARY", name), "-municode")
    build(folder / "bcryptprimitives.dll", RANDOM, "-shared", "-ladvapi32")
    # python3.dll, the interpreter's stable interface, hands each name on.
    exported = [each for each in names(folder / f"{name}.dll") if each.startswith(("Py", "_Py"))]
    table = folder / "python3.def"
    table.write_text("EXPORTS\n" + "".join(f"{each} = {name}.{each}\n" for each in exported))
    build(folder / "python3.dll", "int unused;\n", "-shared", "-nostdlib", str(table))


def build(out: Path, source: str, *flags: str) -> None:
    code = out.with_suffix(".c")
    code.write_text(source)
    subprocess.run([COMPILER, "-O1", "-o", out, code, *flags], check=True)
    code.unlink()


def names(library: Path) -> list[str]:
    shown = subprocess.run(["x86_64-w64-mingw32-objdump", "-p", library], capture_output=True, text=True, check=True)
    lines = shown.stdout.partition("[Ordinal/Name Pointer] Table")[2].splitlines()
    return [line.split()[-1] for line in lines if line.strip().startswith("[")]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
