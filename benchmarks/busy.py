"""Speed beside busy neighbours: edge with a fixed number of threads, with its own team, its server, the C library of an
exported model, and llama.cpp.

    python benchmarks/busy.py [MODEL] [--busy 0,1,2,4,8] [--kinds decode,prefill,batch] [--json]
    python benchmarks/busy.py --kinds decode,prefill,batch --busy 0,1,2 --rounds 2      all tables, in some minutes

N loops that never sleep run beside each unit of work, wherever the system puts them. All engines are loaded at once and
take turns within each round, so that the machine's mood is everybody's. Joules are the worker's CPU time by the profile
of the processor, per token: an estimate, and shown as one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field

from instructions import Counter
from machine import machine, say
from model_files import WORKERS
from turns import Worker

from edge.budget import format_joules
from edge.cli.terminal.show import table
from edge.devices.host import logical_cores
from edge.devices.profiles import host_power
from edge.model.names.catalog import find_model

_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(1_000_000): pass"
_APP = "app in C"
_SETTLE_S = 0.3  # until the system has placed the loops
_KINDS = {
    "decode": {"op": "decode", "depth": 16, "n": 96},
    "prefill": {"op": "prefill", "n": 512},
    "batch": {"op": "batch", "sequences": 4, "depth": 16, "n": 192},
}


@dataclass
class Column:
    """An engine with its settings, and its figures by kind of work and number of loops."""

    name: str
    worker: Worker
    lacks: Sequence[str] = ()  # kinds
    speeds: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    cpu: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # seconds of CPU time per token
    instructions: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # per token

    def measure(self, kind: str, busy: int, seed: int) -> float:
        """Run half a unit of work, to get used to the neighbours, and one; returns its tokens per second."""
        if kind in self.lacks:
            return math.nan
        request = _KINDS[kind]
        self.worker.seconds(seed=seed, **request | {"n": request["n"] // 2})
        before, counter = self.worker.cpu_seconds(), Counter(self.worker.process)
        speed = request["n"] / self.worker.seconds(seed=seed, **request)
        self.speeds.setdefault((kind, busy), []).append(speed)
        self.cpu.setdefault((kind, busy), []).append((self.worker.cpu_seconds() - before) / request["n"])
        if (counted := counter.read()) is not None:
            self.instructions.setdefault((kind, busy), []).append(counted / request["n"])
        return speed

    def joules(self, kind: str, busy: int, watts: float) -> float:
        """Per token. watts: of a busy core."""
        return statistics.median(self.cpu.get((kind, busy), [math.nan])) * watts


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """`count` loops that use all the time they get."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        time.sleep(_SETTLE_S if count else 0)
        yield
    finally:
        for each in loops:
            each.kill()
            each.wait()


def columns(model: str, threads: int, kinds: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """The names and commands of the workers."""
    cells, sequences = 1024, 4 if "batch" in kinds else 1
    edge, llama = str(WORKERS / "edge_worker.py"), str(WORKERS / "llama_worker.py")
    for name, count in {**{f"{each} fixed": -each for each in (1, threads)}, "edge": threads}.items():
        yield name, [sys.executable, edge, "serve", model, "cpu", str(count), str(cells), str(sequences)]
    sizes = [str(threads), str(cells)]
    yield "server", [sys.executable, str(WORKERS / "server_worker.py"), model, *sizes, str(sequences)]
    yield _APP, [sys.executable, str(WORKERS / "app_worker.py"), model, *sizes]
    yield f"llama.cpp, {threads}", [sys.executable, llama, "serve", model, str(threads), str(cells), str(sequences)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--busy", default="0,1,2,4,8")
    parser.add_argument("--kinds", default="decode", help=", ".join(_KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=logical_cores())
    parser.add_argument("--without", default="", help="columns to leave out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    kinds, loads = options.kinds.split(","), [int(each) for each in options.busy.split(",")]
    path = str(find_model(options.model))
    with ExitStack() as opened:
        found = []
        for name, command in columns(path, options.threads, kinds):
            if name not in options.without.split(";"):
                worker = Worker(name, command, {**os.environ, "EDGE_HISTORY": "0"})
                found.append(Column(name, opened.enter_context(closing(worker)), ["batch"] if name == _APP else []))
        for each in found:
            for kind in kinds:
                each.measure(kind, 0, 0)
            each.speeds.clear()
            each.cpu.clear()
            each.instructions.clear()
        for round_ in range(1, options.rounds + 1):
            for busy in loads:
                with neighbours(busy):
                    for kind in kinds:
                        for each in found if round_ % 2 else reversed(found):
                            speed = each.measure(kind, busy, round_)
                            say(f"round {round_}, {busy} busy, {kind}, {each.name}: {speed:,.1f} tok/s")
    report(found, kinds, loads, as_json=options.json)


def report(found: Sequence[Column], kinds: Sequence[str], loads: Sequence[int], *, as_json: bool) -> None:
    watts = host_power().core_watts or 0.0
    cases = [(kind, busy) for kind in kinds for busy in loads]
    if as_json:
        speeds = {
            each.name: {f"{kind} {busy}": each.speeds.get((kind, busy), []) for kind, busy in cases} for each in found
        }
        joules = {
            each.name: {f"{kind} {busy}": each.joules(kind, busy, watts) for kind, busy in cases} for each in found
        }
        print(json.dumps({"machine": machine(), "tok_s": speeds, "joules_estimated": joules}, indent=1))
        return
    here = machine()
    print(f"{here['cpu']} ({here['family']}), {here['cores']} cores, {', '.join(here['isa'])}; {here['system']}")
    headings = ["N", *(each.name for each in found)]
    for kind in kinds:
        rows = [[str(busy), *(_range(each.speeds.get((kind, busy), [])) for each in found)] for busy in loads]
        print(f"\n{kind}, tok/s beside N busy loops: median (range)\n\n{table(headings, rows)}")
        rows = [[str(busy), *(_joules(each.joules(kind, busy, watts)) for each in found)] for busy in loads]
        print(f"\n{kind}, joules per token (estimated, CPU time alone)\n\n{table(headings, rows)}")
        counts = [
            f"{each.name} {statistics.median(counted):,.0f}"
            for each in found
            if (counted := each.instructions.get((kind, loads[0])))
        ]
        print(f"\n{kind}, instructions per token: {', '.join(counts) or 'not counted here'}")


def _joules(joules: float) -> str:
    return "–" if math.isnan(joules) else format_joules(joules)


def _range(speeds: Sequence[float]) -> str:
    if not speeds:
        return "–"
    return f"{statistics.median(speeds):,.0f} ({min(speeds):,.0f}–{max(speeds):,.0f})"


if __name__ == "__main__":
    main()
