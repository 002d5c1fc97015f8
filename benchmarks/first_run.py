"""The first run of a model: from the command to its first token, with an empty cache folder; and the run after it.

Medians over the rounds, in which models take turns. The whole process is timed: the start of Python, the hash of the
file, packing, compiling. EDGE_ISA=avx2 measures code for that instruction set on processors that have more.

    python benchmarks/first_run.py smollm2-135m gemma3-270m --rounds 3
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

from machine import machine

from edge.cli.terminal.show import table


def first_token(model: str, cache: str) -> tuple[float, int]:
    """Seconds of the whole process for one token, and its peak resident set in bytes."""
    command = [sys.executable, "-m", "edge", "run", model, "-p", "Why is the sky blue?", "-n", "1", "--json", "-q"]
    started = time.perf_counter()
    done = subprocess.run(command, env={**os.environ, "EDGE_CACHE": cache}, capture_output=True, text=True)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr.strip())
    return seconds, json.loads(done.stdout)["memory"]["peak_rss"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["smollm2-135m"])
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    times: dict[str, list[tuple[float, float, int]]] = {model: [] for model in chosen.models}
    for _ in range(chosen.rounds):
        for model, runs in times.items():
            with tempfile.TemporaryDirectory() as cache:
                first, peak = first_token(model, cache)
                second, _ = first_token(model, cache)
                runs.append((first, second, peak))
    print(json.dumps(machine()))
    rows = []
    for model, runs in times.items():
        first, second, peak = (statistics.median(column) for column in zip(*runs, strict=True))
        rows.append([model, f"{first:.1f} s", f"{second:.2f} s", f"{peak / 2**20:.0f} MiB"])
    print(table(["model", "first run", "second run", "peak of the first"], rows))


if __name__ == "__main__":
    main()
