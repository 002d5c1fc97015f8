"""Interleaved measurement of engines, each in a process of its own: workers, and the rows of figures they fill."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from llama_bench import BenchWorker, LlamaBench
from machine import say
from model_files import WORKERS, vocabulary

from edge.devices.load import others_from_now

EDGE, LLAMA, OPENVINO = "edge", "llama.cpp", "OpenVINO"
QUIET_S, PATIENCE_S, REPLY_S = 0.1, 10.0, 300.0
_TICKS_S = os.sysconf("SC_CLK_TCK")
_BUSY_LOOP = """
import os, sys
os.sched_setaffinity(0, {int(sys.argv[1])})
parent = os.getppid()
print(flush=True)
while os.getppid() == parent:  # never left behind
    for _ in range(100_000):
        pass
"""


@dataclass(frozen=True)
class Sizes:
    """Token counts of the rows, and the shape of the large model."""

    steps: int = 64
    deep: int = 4096
    prefills: tuple[int, ...] = (512, 2048)
    memory: int = 2048
    large: tuple[int, int, int] = (2048, 16, 8192)  # hidden, layers, FFN

    @property
    def cells(self) -> int:
        return max(self.deep, *self.prefills) + 256


TINY = Sizes(steps=16, deep=256, prefills=(32, 64), memory=128, large=(256, 2, 1024))


@dataclass
class Row:
    """One line of the table: the figures of every engine, in the order of the rounds."""

    name: str
    unit: str
    runs: dict[str, list[float]]
    less_is_better: bool = False
    share_of: dict[str, float] = field(default_factory=dict)  # shown as a percentage behind the figure
    compare: bool = True

    def median(self, engine: str) -> float | None:
        return statistics.median(self.runs[engine]) if self.runs.get(engine) else None

    def ratio(self, peer: str) -> float | None:
        ours, theirs = self.median(EDGE), self.median(peer)
        return ours / theirs if self.compare and ours and theirs else None

    def to_dict(self) -> dict[str, Any]:
        medians = {engine: self.median(engine) for engine in self.runs}
        ratios = {peer: self.ratio(peer) for peer in (LLAMA, OPENVINO, BenchWorker.engine)}
        shares = {e: m / self.share_of[e] for e, m in medians.items() if m and e in self.share_of}
        return {**asdict(self), "medians": medians, "edge_over": ratios, "shares": shares}


class WorkerError(Exception):
    """A worker failed, or died."""


class Worker:
    """One engine in its own process, loaded; `seconds` is one unit of work."""

    def __init__(self, engine: str, command: Sequence[str], environment: dict[str, str]) -> None:
        self.engine = engine
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        try:
            self.version = str(self._reply()["version"])
        except WorkerError:
            self.close()
            raise

    def seconds(self, **request: Any) -> float:
        return float(self._ask(request)["seconds"])

    def peak(self) -> int:
        """Its peak resident set so far, bytes."""
        return int(self._ask({"op": "memory"})["peak"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            raise WorkerError("the worker is gone") from None
        return self._reply()

    @property
    def process(self) -> int:
        return self._process.pid

    def cpu_seconds(self) -> float:
        """CPU time of all its threads so far."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / _TICKS_S

    def close(self) -> None:
        """End it; it stops by itself when stdin does."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout
        with deadline(self._process, REPLY_S):
            line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"it ended (status {self._process.wait()})"}
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply


@dataclass
class Setting:
    """The settings of all measurements."""

    backend: str
    isa: str | None
    threads: int
    openvino: Path | None
    cache: Path
    sizes: Sizes
    rounds: int
    starts: int
    wanted: tuple[str, ...]
    llama_bench: LlamaBench | None = None
    foreign: list[float] = field(default_factory=list)  # of every unit: share of the machine that others used
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return not self.wanted or any(word in name for word in self.wanted)

    def engines(self) -> list[str]:
        """Those with workers, which measure memory and starts as well."""
        return [EDGE, LLAMA] + ([OPENVINO] if self.openvino else [])

    def columns(self) -> list[str]:
        return self.engines() + ([BenchWorker.engine] if self.llama_bench else [])

    def command(self, engine: str, mode: str, model: Path, cells: int, *rest: int) -> list[str]:
        """The command line of a worker of this engine."""
        if engine == EDGE:
            words = [sys.executable, "edge_worker.py", mode, model, self.backend, self.threads, cells, *rest]
        elif engine == LLAMA:
            words = [sys.executable, "llama_worker.py", mode, model, self.threads, cells, *rest]
        else:
            words = [self.openvino, "openvino_worker.py", mode, model, self.threads, vocabulary(model), *rest]
        words[1] = WORKERS / str(words[1])
        return [str(word) for word in words]

    def environment(self, engine: str) -> dict[str, str]:
        """The environment of workers, which keep bytecode: else every start would compile edge's modules. Beside other
        workers and busy cores they are slower than a user's runs, so the history leaves them out."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        return {**kept, "EDGE_HISTORY": "0", **({"EDGE_ISA": self.isa} if engine == EDGE and self.isa else {})}

    def skip(self, engine: str, where: str, why: object) -> None:
        say(f"{engine} is left out of {where}: {why}")
        self.skipped[f"{engine}, {where}"] = str(why)


class Team:
    """The workers of one model, measured interleaved."""

    def __init__(self, setting: Setting, model: Path, where: str) -> None:
        self._setting, self._where = setting, where
        self._workers: list[Worker | BenchWorker] = []
        for engine in setting.engines():
            command = setting.command(engine, "serve", model, setting.sizes.cells)
            try:
                worker = Worker(engine, command, setting.environment(engine))
            except WorkerError as error:
                setting.skip(engine, where, error)
                continue
            self._workers.append(worker)
        if setting.llama_bench:
            self._workers.append(BenchWorker(setting.llama_bench, model))
        setting.versions |= {worker.engine: worker.version for worker in self._workers}

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def speeds(self, name: str, n: int, **request: Any) -> Row:
        """A row in tok/s: `n` tokens per unit, `rounds` units after one to warm up."""
        return self.speeds_both(name, n, [undisturbed], **request)[0]

    def speeds_both(self, name: str, n: int, conditions: Sequence[Any], only: str = "", **request: Any) -> list[Row]:
        """The same under each condition (a context manager), interleaved."""
        say(f"measuring {name} ...")
        rows = [Row(name, "tok/s", {}) for _ in conditions]
        for number in range(self._setting.rounds + 1):
            for row, condition in zip(rows, conditions, strict=True):
                for worker in [w for w in self._workers if w.engine not in only.split(",")]:
                    self._measure(worker, row, condition, number, n=n, **request)
        return rows

    def _measure(self, worker: Worker | BenchWorker, row: Row, condition: Any, number: int, **request: Any) -> None:
        """One unit of work; each engine's first, number 0, does not count. Every round has its own tokens."""
        wait_until_quiet(self._workers)
        try:
            with condition():
                others = others_from_now(worker.cpu_seconds)
                seconds = worker.seconds(seed=number, **request)
                taken = others()
            if condition is undisturbed:
                self._setting.foreign.append(taken or 0.0)
        except WorkerError as error:
            self._setting.skip(worker.engine, f"{row.name} and all after it", error)
            self._workers.remove(worker)
            worker.close()
            return
        if number:
            row.runs.setdefault(worker.engine, []).append(request["n"] / seconds)


def quiet_seconds(
    worker: Worker, workers: Sequence[Worker | BenchWorker], foreign: list[float], **request: Any
) -> float:
    """Seconds of a unit of work, begun once no worker uses CPU time. foreign: receives the share of the machine that
    others used meanwhile."""
    wait_until_quiet(workers)
    others = others_from_now(worker.cpu_seconds)
    seconds = worker.seconds(**request)
    foreign.append(others() or 0.0)
    return seconds


def wait_until_quiet(workers: Sequence[Worker | BenchWorker]) -> None:
    """Wait until no worker has used CPU time for a while: some engines' threads spin after their work."""
    deadline = time.monotonic() + PATIENCE_S
    before = [worker.cpu_seconds() for worker in workers]
    while True:
        time.sleep(QUIET_S)
        now = [worker.cpu_seconds() for worker in workers]
        if now == before:
            return
        if time.monotonic() > deadline:
            restless = [w.engine for w, a, b in zip(workers, before, now, strict=True) if a != b]
            say(f"warning: {', '.join(restless)} keeps using CPU time while it should be idle")
            return
        before = now


@contextmanager
def undisturbed() -> Iterator[None]:
    yield


class BusyCores:
    """One endless loop per core, stopped except inside `with busy():`."""

    def __init__(self) -> None:
        cores = sorted(os.sched_getaffinity(0))
        self._loops = [
            subprocess.Popen([sys.executable, "-c", _BUSY_LOOP, str(core)], stdout=subprocess.PIPE) for core in cores
        ]
        for process in self._loops:
            assert process.stdout
            process.stdout.readline()
        self._signal(signal.SIGSTOP)

    def __enter__(self) -> BusyCores:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._loops:
            process.kill()
            process.communicate()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        time.sleep(0.05)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for process in self._loops:
            process.send_signal(number)


@contextmanager
def deadline(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """Kill the process if the block takes longer."""

    def expire(*_: object) -> None:
        say(f"killed: no answer in {seconds:.0f} s")
        process.kill()

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
