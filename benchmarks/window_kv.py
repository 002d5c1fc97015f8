"""Many KV rows: bytes and speed of Gemma 3 270M's rings, beside an older edge and llama.cpp; of pages that are read.

    python benchmarks/window_kv.py [--model gemma3-270m] [--before CHECKOUT] [--rows 512,8192,32768] [--rounds 5]
                                   [--threads N] [--reads 512,1024]

15 of its 18 layers have windows of 512. Each engine is a process of its own that has read `rows` tokens; then they take
turns: 16 steps (decode) and a chunk of 512 tokens (prefill), each behind those rows, to which the cache goes back. A
speed is the median of rounds; a ratio is the median of ratios within a round, ours to the other's: above 1 we are
faster. --before: a checkout of an older revision, which runs as it is. --reads: rows that a head reads in a step under
policy `quest`, an engine for each; `--model smollm2-135m --rows 4096,8192 --reads 512,1024,2048` shows what they save.
f16 rows; llama.cpp through our engine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from machine import machine

from edge.budget import format_bytes
from edge.cli.terminal.show import table
from edge.devices.host import usable_cores

CHUNK, STEPS = 512, 16
WORKER = f"""
import json, sys, time
import numpy as np
from edge.backends import base, find_backend
from edge.errors import EdgeError
from edge.model.model import open_model

name, rows, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = open_model(sys.argv[4])
try:
    backend = find_backend(name, model.file, model.spec)
except EdgeError:
    backend = find_backend("tvm", model.file, model.spec)  # as older revisions call the engine
reads = {{"reads": int(sys.argv[5])}} if int(sys.argv[5]) else {{}}
config = base.EngineConfig(rows + {CHUNK}, {CHUNK}, "f16", threads, **reads)
engine = backend.load(model.file, model.spec, config)
ids = (np.arange(rows + {CHUNK}) * 7919 % model.spec.vocab).astype(np.int32)
engine.forward(ids[:rows])
end = getattr(base, "end_of", lambda kv: None)(engine.kv)
back = (rows,) if end is None else (rows, end)
print(json.dumps(engine.kv.nbytes), flush=True)
for line in sys.stdin:
    started = time.perf_counter()
    for _ in range({STEPS} if line == "steps\\n" else 1):
        engine.forward(ids[rows : rows + (1 if line == "steps\\n" else {CHUNK})])
    print(json.dumps(time.perf_counter() - started), flush=True)
    engine.kv.truncate(*back)
"""


class Worker:
    """An engine in a process of its own. tree: a folder with the package `edge`; None: this one."""

    def __init__(
        self, backend: str, rows: int, threads: int, model: str, tree: Path | None = None, reads: int = 0
    ) -> None:
        # It imports from where it works before anything else, then from PYTHONPATH, then what is installed.
        environment = os.environ | ({"PYTHONPATH": str(tree)} if tree else {})
        self._process: Any = subprocess.Popen(
            [sys.executable, "-c", WORKER, backend, str(rows), str(threads), model, str(reads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=tree,
        )  # fmt: skip

    def read(self) -> Any:
        return json.loads(self._process.stdout.readline())

    def run(self, kind: str) -> float:
        """Seconds."""
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        return float(self.read())

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def tree_of(checkout: Path | None) -> Iterator[Path | None]:
    """A folder in which a checkout's packages lie as they are imported."""
    if checkout is None:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "edge"
        package.mkdir()
        for each in [
            *(checkout / "edge").iterdir(),
            *(checkout / name for name in ("backends", "converters", "devices")),
        ]:
            (package / each.name).symlink_to(each.resolve())
        yield Path(folder)


def measure(model: str, rows: int, threads: int, rounds: int, before: Path | None, reads: list[int]) -> list[list[str]]:
    """A line of the table for each engine."""
    names: dict[str, tuple[str, Path | None, int]] = {"now": ("cpu", None, 0), "llama.cpp": ("llamacpp", None, 0)}
    names |= {f"quest:rows={each}": ("cpu", None, each) for each in reads}
    if before:
        names["before"] = ("cpu", before, 0)
    with ExitStack() as stack:
        workers, nbytes = {}, {}
        for name, (backend, tree, read) in names.items():
            workers[name] = stack.enter_context(closing(Worker(backend, rows, threads, model, tree, read)))
            nbytes[name] = workers[name].read()
        times: dict[tuple[str, str], list[float]] = {}
        for round_ in range(rounds + 1):
            for kind in ("steps", "chunk"):
                for name in list(workers) if round_ % 2 else reversed(list(workers)):
                    seconds = workers[name].run(kind)
                    if round_:  # the first warms up
                        times.setdefault((name, kind), []).append(seconds)
    lines = []
    for name in names:
        line = [str(rows), name, format_bytes(nbytes[name])]
        for kind, tokens in (("steps", STEPS), ("chunk", CHUNK)):
            own, ours = times[name, kind], times["now", kind]
            ratio = statistics.median(other / one for one, other in zip(ours, own, strict=True))
            line += [f"{tokens / statistics.median(own):.1f}", f"{ratio:.2f}"]
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--rows", default="512,8192,32768")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--reads", default="")
    arguments = parser.parse_args()
    with tree_of(arguments.before) as before:
        lines: list[list[str]] = []
        for rows in map(int, arguments.rows.split(",")):
            reads = [int(each) for each in filter(None, arguments.reads.split(","))]
            lines += measure(arguments.model, rows, arguments.threads, arguments.rounds, before, reads)
    headings = ["rows", "engine", "KV", "decode tok/s", "now/it", "prefill tok/s", "now/it"]
    print(table(headings, lines, left=2))
    said = machine()
    print(f"\n{said['cpu']}, {arguments.threads} of {said['cores']} cores, {', '.join(said['isa'])}, {said['system']}")
    lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout
    print(next((line for line in lscpu.splitlines() if line.startswith("Model name")), ""))


if __name__ == "__main__":
    main()
