"""Other compilers of our shaders than those that run them, and a checker of their memory accesses."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
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
