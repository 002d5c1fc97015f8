"""The start of `edge run`: wall and CPU time of one token by parts, and the memory before the model is loaded.

Each run is a process of its own, with a warm cache folder; figures are medians of the rounds. The first line of the
table is the command as users run it. For the parts a second process runs it under `start_parts.py`, which times imports
and the functions of each part; the parts add up to that process, which is a little slower.

    python benchmarks/start.py smollm2-135m --rounds 9
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from start_parts import EXIT, INTERPRETER, PARTS

from edge.cli.terminal.show import table

_DRIVER = Path(__file__).with_name("start_parts.py")
_MEMORY = "memory"


def run(command: list[str], compiled: str) -> dict[str, float]:
    """When it started and ended; seconds of CPU time; MiB at the peak. compiled: the folder of Python's compiled
    modules, which an installation has, and a checkout with PYTHONDONTWRITEBYTECODE has not."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    started = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment | {"PYTHONPYCACHEPREFIX": compiled})
    _, status, used = os.wait4(process.pid, 0)
    ended, process.returncode = time.monotonic(), status
    if status:
        sys.exit(f"{' '.join(command)}: status {status}")
    return {"started": started, "ended": ended, "cpu": used.ru_utime + used.ru_stime, "peak": used.ru_maxrss / 2**10}


def measure(model: str, compiled: str) -> dict[str, tuple[float, float]]:
    """Seconds of wall and CPU time of the command and of its parts; MiB before the load and at the peak."""
    arguments = ["run", model, "-p", "Hi", "-n", "1", "-q"]
    whole = run([sys.executable, "-m", "edge", *arguments], compiled)
    with tempfile.NamedTemporaryFile(mode="r") as report:
        driven = run([sys.executable, str(_DRIVER), report.name, *arguments], compiled)
        inside = json.load(report)
    wall, cpu = inside["wall"], inside["cpu"]
    wall[INTERPRETER], wall[EXIT] = inside["began"] - driven["started"], driven["ended"] - inside["ended"]
    cpu[EXIT] = driven["cpu"] - sum(cpu.values())
    found = {"whole command": (whole["ended"] - whole["started"], whole["cpu"])}
    found |= {part: (wall.get(part, 0.0), cpu.get(part, 0.0)) for part in PARTS}
    return {**found, _MEMORY: (inside["rss"], whole["peak"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("-r", "--rounds", type=int, default=9)
    chosen = parser.parse_args()
    found: dict[str, list[dict[str, tuple[float, float]]]] = {model: [] for model in chosen.models}
    with tempfile.TemporaryDirectory() as compiled:
        for number in range(chosen.rounds + 1):
            for model, runs in found.items():
                measured = measure(model, compiled)
                if number:  # the first one fills caches
                    runs.append(measured)
    rows, memory = [], []
    for model, runs in found.items():
        for part in runs[0]:
            wall, cpu = (statistics.median(column) for column in zip(*(run[part] for run in runs), strict=True))
            if part == _MEMORY:
                memory.append(f"{model}: {wall:.1f} MiB resident before the load, {cpu:.1f} at the peak")
            else:
                rows.append([model, part, f"{1000 * wall:.0f}", f"{1000 * cpu:.0f}"])
    print(table(["model", "part", "ms", "CPU-ms"], rows, left=2))
    print("\n".join(memory))
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=True).stdout.splitlines()
    print(next((line for line in lines if line.startswith("Model name")), ""))


if __name__ == "__main__":
    main()
