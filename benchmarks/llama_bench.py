"""Speeds by llama.cpp's own `llama-bench`: of a build of it, or of one of its forks."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LlamaBench:
    path: Path
    arguments: tuple[str, ...]

    def run(self, model: Path, prompt: int, steps: int) -> dict[str, float]:
        """Tokens per second of decode and prefill, of one repetition after its own warm-up. 0 tokens: not measured."""
        found = self._measured(model, "-p", prompt, "-n", steps)
        return {"decode" if each["n_gen"] else "prefill": float(each["avg_ts"]) for each in found}

    def decode(self, model: Path, depth: int, steps: int) -> float:
        """Tokens per second of decode behind `depth` tokens, likewise."""
        if not depth:
            return self.run(model, 0, steps)["decode"]
        at_depth = ["-n", steps, "-d", depth] if self._has_depths else ["-n", 0, "-gp", f"{depth},{steps}"]
        return float(self._measured(model, "-p", 0, *at_depth)[0]["avg_ts"])

    def version(self, model: Path) -> str:
        return f"llama-bench {self._measured(model, '-p', 1, '-n', 0)[0]['build_commit']}"

    @cached_property
    def _has_depths(self) -> bool:
        """As llama.cpp has; ik_llama.cpp does not."""
        return "--n-depth" in self._output("--help")

    def _measured(self, model: Path, *arguments: object) -> list[dict[str, Any]]:
        output = self._output("-m", model, *arguments, "-r", 1, "-o", "json", *self.arguments)
        found: list[dict[str, Any]] = json.loads(output)
        return found

    def _output(self, *arguments: object) -> str:
        try:
            done = subprocess.run([str(self.path), *map(str, arguments)], capture_output=True, text=True)
        except OSError as error:
            raise SystemExit(f"{self.path} cannot be run: {error.strerror}") from None
        if done.returncode:
            raise SystemExit(f"{self.path} failed: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}")
        return done.stdout


class BenchWorker:
    """A `turns.Worker` that starts llama-bench for each unit; it has loaded and warmed up before it counts."""

    engine = "llama-bench"

    def __init__(self, bench: LlamaBench, model: Path) -> None:
        self._bench, self._model = bench, model
        self.version = bench.version(model)

    def seconds(self, *, op: str, n: int, depth: int = 0, **_: Any) -> float:
        if op == "prefill":
            return n / self._bench.run(self._model, n, 0)["prefill"]
        return n / self._bench.decode(self._model, depth, n)

    def cpu_seconds(self) -> float:
        return 0.0

    def close(self) -> None:
        pass
