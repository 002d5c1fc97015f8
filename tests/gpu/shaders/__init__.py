"""Other compilers of our shaders than those that run them, and a checker of their memory accesses."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
METAL = HERE.parents[1] / "apps" / "runtime" / "metal"  # whose metal_stdlib is for C++ compilers
DAWN = HERE.parents[2] / "build" / "dawn"  # where `make` puts the npm package `webgpu`


def has_dawn() -> bool:
    return shutil.which("node") is not None and (DAWN / "node_modules" / "webgpu").is_dir()


def dawn_says(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Errors and warnings of Dawn, which Chromium compiles WGSL with, by the names of sources that have any."""
    command = ["node", str(HERE / "dawn.mjs"), str(DAWN)]
    done = subprocess.run(command, input=json.dumps(sources), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert found.keys() == sources.keys()
    return {name: messages for name, messages in found.items() if messages}


def metal_says(sources: Mapping[str, str], folder: Path) -> list[str]:
    """Errors of a C++ compiler, which takes Metal's kernels for the functions that Metal has; and what C++ allows and
    Metal does not: memory of a threadgroup that is declared within a block. Each has its source's name."""
    found = [
        f"{name}: {line}" for name, text in sources.items() for line in re.findall("^ {3,}threadgroup .*", text, re.M)
    ]
    whole = folder / "kernels.cpp"
    parts = [f'namespace k{at} {{\n#line 1 "{name}"\n{text}\n}}\n' for at, (name, text) in enumerate(sources.items())]
    whole.write_text("#include <metal_stdlib>\n" + "".join(parts))
    command = ["c++", "-std=c++17", "-fsyntax-only", "-w", f"-I{METAL}", str(whole)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return found + [line for line in done.stderr.splitlines() if "error" in line]
