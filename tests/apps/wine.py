"""Programs for Windows in tests: built by MinGW, run by Wine, in a prefix of their own that ends with the tests."""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from runtime_library import build

COMPILER = "x86_64-w64-mingw32-gcc"
FLAGS = ("-static", "-Wno-float-conversion")  # of MinGW's isnan
LIBRARIES = ("-lsynchronization",)
_DEBIAN = Path("/usr/lib/wine")  # which is in no PATH if the package `wine` is missing


def build_for_windows(sources: Sequence[str | Path], *flags: str | Path) -> Path:
    """A program of files of the runtime and others, without a warning. Skips without MinGW."""
    return build(sources, (*FLAGS, *map(str, flags)), ".exe", COMPILER, LIBRARIES)


def command(*words: str | Path) -> dict[str, Any]:
    """How a program with these words is run: arguments of subprocess.Popen. Skips without Wine."""
    wine = shutil.which("wine64") or shutil.which("wine64", path=str(_DEBIAN))
    if wine is None:
        pytest.skip("no wine64")
    return {"args": [wine, *map(str, words)], "env": _environment(), "text": True, "encoding": "utf-8"}


def windows_path(path: Path) -> str:
    return "Z:" + str(path.absolute()).replace("/", "\\")


def run(*words: str | Path, **more: Any) -> str:
    """What a program printed."""
    done = subprocess.run(**command(*words), capture_output=True, timeout=600, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout).replace("\r\n", "\n")


@lru_cache
def _environment() -> dict[str, str]:
    """With a prefix whose system32 is Wine's own folder: a prefix that Wine makes is a copy of it, of 700 MB."""
    kept = TemporaryDirectory(prefix="edge-wine-")
    home = Path(kept.name)
    prefix = home / "prefix"
    environment = os.environ | {
        "HOME": str(home), "WINEPREFIX": str(prefix), "WINEDEBUG": "-all", "LC_ALL": "C.UTF-8",
    }  # fmt: skip
    libraries = next(Path("/usr/lib").glob("*/wine/x86_64-windows"), None)
    if libraries is not None:
        for folder in ("drive_c/windows", "dosdevices"):
            (prefix / folder).mkdir(parents=True)
        (prefix / "drive_c/windows/system32").symlink_to(libraries)
        (prefix / "dosdevices/c:").symlink_to("../drive_c")
        (prefix / "dosdevices/z:").symlink_to("/")
        (prefix / ".update-timestamp").write_text("disable\n")

    def end() -> None:
        server = next((found for name in ("wineserver64", "wineserver") if (found := _DEBIAN / name).exists()), None)
        if server is not None:
            subprocess.run([server, "-k"], env=environment, timeout=30, check=False)
        kept.cleanup()

    atexit.register(end)
    return environment
