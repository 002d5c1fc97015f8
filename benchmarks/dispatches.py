"""What a run costs the host: the calling thread's CPU time for each dispatch, of kernels that do nothing.

Engines of small models are bound by it: a token of SmolLM2-135M takes 153 dispatches. read: CPU time and elapsed time
of a run of one dispatch and of reading 4 bytes, the least that a token can take.

    python benchmarks/dispatches.py
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from edge.backends.tvm.gpu.hosts import Adapter, all_adapters, open_device
from edge.backends.tvm.gpu.kernels import threads as t
from edge.backends.tvm.gpu.lowering import lower
from edge.backends.tvm.gpu.program import Dispatch, Slice
from edge.cli.terminal.show import table

DISPATCHES, ROUNDS = 153, 60


@dataclass(frozen=True)
class Cost:
    """Microseconds: dispatch, a run's CPU time over its dispatches; alike, where all are of one kernel; read, CPU time
    of a run of one dispatch and a read; waited, how long both take."""

    dispatch: float
    alike: float
    read: float
    waited: float


def host_cost(adapter: Adapter, dispatches: int = DISPATCHES, rounds: int = ROUNDS) -> Cost:
    """The medians of `rounds`. Consecutive dispatches are of different kernels, like those of a model, but `alike`."""

    def nothing(scope: Any) -> None:
        with t.when(scope.thread == -1):
            t.store(scope.out, scope.thread, scope.x[scope.thread] * scope.number)

    device = open_device(adapter)
    try:
        names = ("edge_one", "edge_two", "edge_three")
        reads = {"x": "float32", "y": "float32", "z": "float32"}
        device.prepare({
            name: lower(t.build(name, 64, reads, {"out": "float32"}, ["number"], nothing), adapter.language)
            for name in names
        })  # fmt: skip
        buffers = {name: device.create(1024) for name in "oxyz"}
        slices = tuple(map(Slice, "oxyz"))
        mixed = [Dispatch(names[at % 3], slices, (at,), (1, 1), "attention") for at in range(dispatches)]
        alike = [Dispatch(names[0], slices, (at,), (1, 1), "attention") for at in range(dispatches)]
        recordings = [device.record(each, buffers) for each in (mixed, alike, mixed[:1])]

        def read() -> None:
            device.run(recordings[2])
            device.read(buffers["o"], 0, 4)

        work: list[Callable[[], None]] = [lambda: device.run(recordings[0]), lambda: device.run(recordings[1]), read]
        spent = list[list[tuple[float, float]]]()
        for _ in range(rounds):
            spent.append([])
            for each in work:
                cpu, elapsed = time.thread_time(), time.perf_counter()
                each()
                spent[-1].append((1e6 * (time.thread_time() - cpu), 1e6 * (time.perf_counter() - elapsed)))
                device.read(buffers["o"], 0, 4)  # until the device has nothing to do
        mixed_cpu, alike_cpu, read_cpu = (median(each[at][0] for each in spent) for at in range(3))
        return Cost(mixed_cpu / dispatches, alike_cpu / dispatches, read_cpu, median(each[2][1] for each in spent))
    finally:
        device.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    costs = [(adapter, host_cost(adapter, rounds=rounds)) for adapter in all_adapters()]
    lines = subprocess.run(["lscpu"], capture_output=True, text=True, check=False).stdout.splitlines()
    print(next((" ".join(line.split()) for line in lines if line.startswith("Model name")), ""))
    print(table(
        ["adapter", "µs/dispatch", "of one kernel", "run and read, CPU µs", "elapsed µs"],
        [
            [f"{adapter.place} {adapter.name}", *(f"{each:.2f}" for each in (cost.dispatch, cost.alike)),
             f"{cost.read:.0f}", f"{cost.waited:.0f}"]
            for adapter, cost in costs
        ],
    ))  # fmt: skip


if __name__ == "__main__":
    main()
