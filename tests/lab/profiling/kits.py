"""Kits of a small model, made once, and their results."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path

from conftest import GOLDEN
from shared import made_once

from edge.devices.profiles import HOST
from edge.lab.profiling.kit.make import MODEL, PROGRAM, make_kit
from edge.lab.profiling.kit.result import Result, parse_result
from edge.lab.profiling.profile import Settings
from edge.run.starting.opening import open_model

GOLDEN_MODEL = GOLDEN / "llama-gqa-tied.gguf"
QUICK = ("--quick", "-p", "32", "-n", "8", "-d", "16,48", "-r", "2", "--max-kv-size", "128")


def settings(sustained: float = 0.0, watts: float | None = None) -> Settings:
    return Settings(
        prompt=32, answer=8, contexts=[16, 48], repetitions=3, speed_s=60.0, curve_s=60.0, sustained_s=sustained,
        operators_s=1.0, max_kv_size=128, watts=watts,
    )  # fmt: skip


@lru_cache
def kit_for(device: str = HOST, sustained: float = 0.0, watts: float | None = None) -> Path:
    def make(folder: Path) -> None:
        chosen = settings(sustained, watts)
        make_kit(open_model(str(GOLDEN_MODEL)), GOLDEN_MODEL.name, folder, device, chosen, quick=True)

    return made_once(make, str(GOLDEN_MODEL), "kit", device, sustained, watts)


def run_program(folder: Path, *emulator: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    words = [*emulator, folder / PROGRAM, folder / MODEL]
    return subprocess.run(words, capture_output=True, timeout=600, env=os.environ | variables)


@lru_cache
def result_text() -> bytes:
    """Of this machine, with a long run of half a second."""
    done = run_program(kit_for(sustained=0.5))
    assert done.returncode == 0, done.stderr
    return done.stdout


def result() -> Result:
    return parse_result(result_text(), "it")


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def quietly(what: str, share: float) -> None:
    """Take a run's progress, and print nothing."""
    assert what
    assert 0 <= share <= 1
