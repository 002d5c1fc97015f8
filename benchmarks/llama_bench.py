"""Speeds by llama.cpp's own `llama-bench`: of a build of it, or of one of its forks."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class LlamaBench:
    path: Path
    arguments: tuple[str, ...]

    def run(self, model: Path, prompt: int, steps: int) -> dict[str, float]:
        """Tokens per second of decode and prefill, of one repetition after its own warm-up. 0 tokens: not measured."""
        command = [str(self.path), "-m", str(model), "-p", str(prompt), "-n", str(steps), "-r", "1", "-o", "json"]
        try:
            done = subprocess.run([*command, *self.arguments], capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"{self.path} cannot be run: {error.strerror}") from None
        if done.returncode:
            raise SystemExit(f"{self.path} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        found = json.loads(done.stdout)
        return {"decode" if each["n_gen"] else "prefill": float(each["avg_ts"]) for each in found}
