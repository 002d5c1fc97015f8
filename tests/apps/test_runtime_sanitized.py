"""Tests of the C runtime once more, in a child whose builds check addresses and undefined behaviour."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runtime_library import SANITIZE

# Tests of parts of the runtime, whose code takes what Python gives it:
FILES = (
    "test_constrain.py", "test_model_file.py", "test_runtime_ears.py", "test_runtime_governor.py", "test_runtime_kv.py",
    "test_runtime_sampler.py", "test_runtime_tokens.py", "test_runtime_tools.py",
)  # fmt: skip

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("name", FILES)
def test_sanitizers_find_nothing(name: str) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no GCC")
    asan = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout
    if not Path(asan.strip()).is_absolute():
        pytest.skip("GCC has no address sanitizer")
    options = {SANITIZE: "1", "LD_PRELOAD": asan.strip(), "ASAN_OPTIONS": "detect_leaks=0", "OPENBLAS_NUM_THREADS": "1"}
    environment, path = os.environ | options, next(Path(__file__).parent.rglob(name))
    command = [sys.executable, "-m", "pytest", "-qxs", "-p", "no:cacheprovider", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
