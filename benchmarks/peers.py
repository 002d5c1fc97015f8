"""edge against its peers on this machine: llama.cpp and OpenVINO GenAI, on one GGUF file with as many threads.

    python benchmarks/peers.py [--backend tvm] [--isa avx2] [--large] [--busy] [--json]
    python benchmarks/peers.py --openvino-python DIR    a venv with `pip install openvino-genai`: its columns
    python benchmarks/peers.py --rows start,memory      only the rows whose names contain one of these words
    python benchmarks/peers.py --tiny --rounds 1        does everything run? (its figures mean nothing)

The file is all Q4_0: SmolLM2-135M (or --model) through llama.cpp's own quantizer with `pure`. Every engine sits in a
process of its own that loads once and does one unit of work at a time, in turns A B C A B C; before each unit the
parent waits until no worker uses CPU time. Columns:

- edge: the engine of --backend, f16 KV, called as a session calls it. --isa sets EDGE_ISA for it, and for it alone.
- llama.cpp: its C API without edge; flash attention, f16 KV, repacked weights, its own defaults otherwise.
- OpenVINO: GenAI's LLMPipeline on the same file, f16 KV in the rows of speed (faster there than its
  8-bit default); its own defaults otherwise. Times come from its own metrics.
- edge / peer: ratio of the medians. In rows marked (−) less is better, so that a ratio below 1 is in edge's favour.

Rows:

- decode at 0-64, at 4096: 64 steps of one token and its argmax, into a cache that holds none or 4,096 rows before.
- weights read: decode speed × the bytes of all tensors that one token needs, and in brackets its share of the memory
  bandwidth measured here with NumPy. Above 100 % means that caches helped.
- prefill: from token ids to the logits after the last of them, in an empty cache.
- memory: the peak resident set of a fresh process that runs a plain script: a context of 2,048 tokens, 32 of them
  generated, with 256 rows to spare. For edge that script is `edge.load`.
- start: from spawning such a process to the first token of a 16-token text on its stdout, with 512 KV rows, files in
  the page cache and the engines' own caches on disk warm.
- tuned peers: llama.cpp reads the file instead of mapping it and reserves one row of logits; OpenVINO loads the folder
  that it saved after its first conversion.
- all cores busy (--busy): decode beside one endless loop per core; in brackets the share of the speed without them,
  measured in turns.
- large (--large): a Llama of random weights (hidden 2048, 16 layers, FFN 8192, 32 and 8 heads of 64: a 0.6 GB file).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs

from edge.catalog import find_model
from edge.cli.show import table
from edge.devices.memory import total_memory
from edge.gguf_file import read_gguf

WORKERS = Path(__file__).with_name("peers")
EDGE, LLAMA, OPENVINO = "edge", "llama.cpp", "OpenVINO"
QUIET_S, PATIENCE_S, REPLY_S = 0.1, 10.0, 300.0
_TICKS_S = os.sysconf("SC_CLK_TCK")
_BANDWIDTH = "GB/s"
_DISTURBED = 0.05  # share of the machine that others may use during a unit
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
    """One line of the table: what every engine measured, in the order of the rounds."""

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
        ratios = {peer: self.ratio(peer) for peer in (LLAMA, OPENVINO)}
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
        """Bytes of its peak resident set so far."""
        return int(self._ask({"op": "memory"})["peak"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError:
            raise WorkerError("the worker is gone") from None
        return self._reply()

    def cpu_ticks(self) -> int:
        """CPU time of all its threads so far, in ticks of 10 ms."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0
        return int(fields[11]) + int(fields[12])

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
        with _deadline(self._process, REPLY_S):
            line = self._process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": f"it ended (status {self._process.wait()})"}
        if "error" in reply:
            raise WorkerError(reply["error"])
        return reply


@dataclass
class Setting:
    """What all measurements share."""

    backend: str
    isa: str | None
    threads: int
    openvino: Path | None
    cache: Path
    sizes: Sizes
    rounds: int
    starts: int
    wanted: tuple[str, ...]
    foreign: list[float] = field(default_factory=list)  # of every unit: share of the machine that others used
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    def wants(self, name: str) -> bool:
        return not self.wanted or any(word in name for word in self.wanted)

    def engines(self) -> list[str]:
        return [EDGE, LLAMA] + ([OPENVINO] if self.openvino else [])

    def command(self, engine: str, mode: str, model: Path, cells: int, *rest: int) -> list[str]:
        """How a worker of this engine is started."""
        if engine == EDGE:
            words = [sys.executable, "edge_worker.py", mode, model, self.backend, self.threads, cells, *rest]
        elif engine == LLAMA:
            words = [sys.executable, "llama_worker.py", mode, model, self.threads, cells, *rest]
        else:
            words = [self.openvino, "openvino_worker.py", mode, model, self.threads, _vocab(model), *rest]
        words[1] = WORKERS / str(words[1])
        return [str(word) for word in words]

    def environment(self, engine: str) -> dict[str, str]:
        return {**os.environ, **({"EDGE_ISA": self.isa} if engine == EDGE and self.isa else {})}

    def skip(self, engine: str, where: str, why: object) -> None:
        say(f"{engine} is left out of {where}: {why}")
        self.skipped[f"{engine}, {where}"] = str(why)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------- workers that stay


class Team:
    """The workers of one model, measured in turns."""

    def __init__(self, setting: Setting, model: Path, where: str) -> None:
        self._setting, self._where = setting, where
        self._workers: list[Worker] = []
        for engine in setting.engines():
            command = setting.command(engine, "serve", model, setting.sizes.cells)
            try:
                worker = Worker(engine, command, setting.environment(engine))
            except WorkerError as error:
                setting.skip(engine, where, error)
                continue
            self._workers.append(worker)
            setting.versions[engine] = worker.version

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def speeds(self, name: str, n: int, **request: Any) -> Row:
        """A row in tok/s: `n` tokens per unit, `rounds` units after one to warm up."""
        return self.speeds_both(name, n, [_nothing], **request)[0]

    def speeds_both(self, name: str, n: int, conditions: Sequence[Any], only: str = "", **request: Any) -> list[Row]:
        """The same under each condition (a context manager), which take turns."""
        say(f"measuring {name} ...")
        rows = [Row(name, "tok/s", {}) for _ in conditions]
        for number in range(self._setting.rounds + 1):
            for row, condition in zip(rows, conditions, strict=True):
                for worker in [w for w in self._workers if w.engine not in only.split(",")]:
                    self._measure(worker, row, condition, number, n=n, **request)
        return rows

    def _measure(self, worker: Worker, row: Row, condition: Any, number: int, **request: Any) -> None:
        """One unit; the first of each engine, number 0, does not count. Every round has its own tokens."""
        wait_until_quiet(self._workers)
        try:
            with condition():
                before, started = machine_ticks() - worker.cpu_ticks(), time.perf_counter()
                seconds = worker.seconds(seed=number, **request)
                others = (machine_ticks() - worker.cpu_ticks() - before) / (time.perf_counter() - started)
            if condition is _nothing:
                self._setting.foreign.append(max(0.0, others) / _TICKS_S / (os.cpu_count() or 1))
        except WorkerError as error:
            self._setting.skip(worker.engine, f"{row.name} and all after it", error)
            self._workers.remove(worker)
            worker.close()
            return
        if number:
            row.runs.setdefault(worker.engine, []).append(request["n"] / seconds)


def machine_ticks() -> int:
    """CPU time that the machine has spent on anything, and that a hypervisor took from it, in ticks."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return user + nice + system + sum(rest)


def wait_until_quiet(workers: Sequence[Worker]) -> None:
    """Until no worker has used CPU time for a while: some engines' threads spin after the work is done."""
    deadline = time.monotonic() + PATIENCE_S
    before = [worker.cpu_ticks() for worker in workers]
    while True:
        time.sleep(QUIET_S)
        now = [worker.cpu_ticks() for worker in workers]
        if now == before:
            return
        if time.monotonic() > deadline:
            restless = [w.engine for w, a, b in zip(workers, before, now, strict=True) if a != b]
            say(f"warning: {', '.join(restless)} keeps using CPU time while it should be idle")
            return
        before = now


@contextmanager
def _nothing() -> Iterator[None]:
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


# ---------------------------------------------------------------- fresh processes


def run_plain(setting: Setting, engine: str, command: Sequence[str], word: str) -> tuple[float, str]:
    """Run a plain script; seconds from its start to the line that begins with `word`, and that line's rest."""
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=setting.environment(engine)
    )
    with process, _deadline(process, REPLY_S):
        assert process.stdout
        for line in process.stdout:
            if line.startswith(word):
                seconds = time.perf_counter() - started
                process.stdout.read()
                return seconds, line.removeprefix(word).strip()
    raise WorkerError(f"the script ended with status {process.returncode} and without an answer")


def fresh_rows(setting: Setting, model: Path) -> Iterator[Row]:
    """Memory and start, as a user has them and with tuned peers."""
    saved = save_openvino(setting, model) if setting.openvino else None
    for tuned in (False, True):
        suffix = ", tuned peers" if tuned else ""
        models = {EDGE: model, LLAMA: model, OPENVINO: (saved or model) if tuned else model}
        rest = {EDGE: [], LLAMA: [int(tuned)], OPENVINO: []}
        count = setting.sizes.memory

        def peak(
            engine: str, models: dict[str, Path] = models, rest: dict[str, list[int]] = rest, count: int = count
        ) -> float:
            command = setting.command(engine, "memory", models[engine], count + 256, *rest[engine], count)
            return int(run_plain(setting, engine, command, "PEAK")[1]) / 2**20

        def start(engine: str, models: dict[str, Path] = models, rest: dict[str, list[int]] = rest) -> float:
            command = setting.command(engine, "start", models[engine], 512, *rest[engine])
            return run_plain(setting, engine, command, "TOKEN")[0] * 1e3

        yield from _fresh(setting, f"memory, {count} tokens{suffix} (−)", "MiB", peak, min(2, setting.starts))
        yield from _fresh(setting, f"start to first token{suffix} (−)", "ms", start, setting.starts)


def _fresh(setting: Setting, name: str, unit: str, measure: Callable[[str], float], repetitions: int) -> Iterator[Row]:
    """One row, the engines in turns; the first turn warms caches up and does not count."""
    if not setting.wants(name):
        return
    say(f"measuring {name} ...")
    row, engines = Row(name, unit, {}, less_is_better=True), setting.engines()
    for number in range(repetitions + 1):
        for engine in list(engines):
            try:
                value = measure(engine)
            except WorkerError as error:
                setting.skip(engine, name, error)
                engines.remove(engine)
                continue
            if number:
                row.runs.setdefault(engine, []).append(value)
    yield row


def save_openvino(setting: Setting, model: Path) -> Path | None:
    """A folder with the model in OpenVINO's own format, written once; None if that failed."""
    folder = model.with_suffix(".openvino")
    link = folder / model.name
    if not (folder / "done").exists():
        folder.mkdir(exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(model)  # it writes next to the file it reads
        command = setting.command(OPENVINO, "save", link, 0)
        if subprocess.run(command, capture_output=True, timeout=REPLY_S).returncode != 0:
            return None
        (folder / "done").touch()
    return folder


@contextmanager
def _deadline(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
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


# ---------------------------------------------------------------- model files and the machine


def make_file(target: Path, kind: str, source: Path, *shape: int) -> Path:
    """A model file in the cache folder, written by `make_file.py` if it is not there yet."""
    if not target.exists():
        say(f"writing {target} ...")
        command = [sys.executable, WORKERS / "make_file.py", kind, source, target, *shape]
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{target} could not be written: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return target


def pure_file(setting: Setting, source: Path) -> Path:
    return make_file(setting.cache / f"{source.stem}.{source.stat().st_size}.pure-Q4_0.gguf", "pure", source)


def large_file(setting: Setting, source: Path) -> Path:
    shape = setting.sizes.large
    return make_file(setting.cache / f"random-llama-{'x'.join(map(str, shape))}.gguf", "random", source, *shape)


def bytes_per_token(model: Path) -> int:
    """Bytes of all tensors that a token needs: an embedding beside a head of its own is only looked up."""
    tensors = read_gguf(model).tensors
    looked_up = {"token_embd.weight"} if "output.weight" in tensors else set()
    return sum(info.nbytes for name, info in tensors.items() if name not in looked_up)


def _vocab(model: Path) -> int:
    """Entries of the vocabulary; a folder that OpenVINO wrote stands for the GGUF file it contains a link to."""
    (file,) = model.glob("*.gguf") if model.is_dir() else [model]
    return read_gguf(file).tensors["token_embd.weight"].shape[1]


def memory_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads can read: the best of several passes over 256 MiB each."""
    arrays = [np.ones((256 << 20) // 4, np.int32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for read in (np.bitwise_or.reduce, np.maximum.reduce):  # at the speed of vector loads, without widening
            for _ in range(20):
                started = time.perf_counter()
                list(pool.map(read, arrays))
                best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - started))
    return best


def machine() -> dict[str, Any]:
    """What this is measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    interesting = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "family": f"{fields.get('cpu family', '?')}.{fields.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in interesting if flag in flags],
        "memory_gib": round(total_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
    }


def find_openvino(given: str | None) -> tuple[Path | None, str]:
    """The interpreter that has OpenVINO GenAI, or None and why."""
    if given is None:
        return None, "no --openvino-python (a venv with `pip install openvino-genai`)"
    path = Path(given)
    candidates = (path, path / "bin/python", path / "venv/bin/python")
    python = next((candidate for candidate in candidates if candidate.is_file()), None)
    if python is None:
        return None, f"no Python interpreter in {path}"
    done = subprocess.run([python, "-c", "import openvino_genai"], capture_output=True, timeout=60)
    return (python, "") if done.returncode == 0 else (None, f"{python} has no openvino_genai")


# ---------------------------------------------------------------- the table


def model_rows(setting: Setting, model: Path, prefix: str, full: bool, busy: bool) -> Iterator[Row]:
    """Speeds on one model; `full` adds what is measured only on the small one."""
    sizes = setting.sizes
    decode = f"{prefix}decode at 0-{sizes.steps}"
    depths = {decode: 0} | ({f"{prefix}decode at {sizes.deep}": sizes.deep} if full else {})
    prefills = {f"{prefix}prefill {n}": n for n in (sizes.prefills if full else sizes.prefills[:1])}
    crowded = f"{prefix}decode, all cores busy"
    busy = busy and setting.wants(crowded)
    if not busy and not any(map(setting.wants, [*depths, *prefills])):
        return
    with Team(setting, model, model.stem) as team:
        for name, depth in depths.items():
            if setting.wants(name):
                row = team.speeds(name, sizes.steps, op="decode", depth=depth)
                yield row
                if depth == 0:
                    yield _weights_read(row, model)
        for name, n in prefills.items():
            if setting.wants(name):
                yield team.speeds(name, n, op="prefill")
        if busy:
            yield from _busy_rows(team, crowded, sizes.steps)


def _weights_read(decode: Row, model: Path) -> Row:
    weights = bytes_per_token(model) / 1e9
    runs = {engine: [speed * weights for speed in speeds] for engine, speeds in decode.runs.items()}
    return Row(f"{decode.name}: weights read", _BANDWIDTH, runs, compare=False)


def _busy_rows(team: Team, name: str, steps: int) -> Iterator[Row]:
    """Decode with the machine to itself and with a busy loop on every core, in turns."""
    with BusyCores() as busy:
        free, crowded = team.speeds_both(name, steps, [_nothing, busy], only=OPENVINO, op="decode", depth=0)
    crowded.share_of = {engine: median for engine in crowded.runs if (median := free.median(engine))}
    yield crowded


def cells(row: Row, engines: Sequence[str]) -> list[str]:
    """A line of the table."""
    figures = []
    for engine in engines:
        median = row.median(engine)
        share = f" ({median / row.share_of[engine]:.0%})" if median and engine in row.share_of else ""
        figures.append("–" if median is None else f"{median:,.{1 if median < 100 else 0}f}{share}")
    ratios = [row.ratio(peer) for peer in engines if peer != EDGE]
    return [row.name, row.unit, *figures, *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def print_report(setting: Setting, about: dict[str, Any], bandwidth: float, rows: Sequence[Row]) -> None:
    engines = setting.engines()
    isa = ", ".join(about["isa"])
    print(f"\n## edge ({setting.backend}{f', EDGE_ISA={setting.isa}' if setting.isa else ''}) against its peers\n")
    print(f"{about['cpu']} (family {about['family']}; {isa}), {about['cores']} cores, {about['memory_gib']} GiB,")
    print(f"{about['system']}; load average at the start {about['load_average']:.2f}.")
    print(f"{setting.threads} threads; memory bandwidth {bandwidth / 1e9:.0f} GB/s (read, NumPy).")
    print("; ".join(f"{engine}: {version}" for engine, version in setting.versions.items()) + ".")
    print(f"Medians of {setting.rounds} rounds ({setting.starts} starts).")
    disturbed = sum(share > _DISTURBED for share in setting.foreign)
    if disturbed:
        print(f"**Not a quiet machine**: others used more than {_DISTURBED:.0%} of it in {disturbed} "
              f"of {len(setting.foreign)} units (most: {max(setting.foreign):.0%}).")  # fmt: skip
    print()
    peers = [f"{EDGE} / {engine}" for engine in engines if engine != EDGE]
    print(table(["", "unit", *engines, *peers], [cells(row, engines) for row in rows], left=2))
    for what, why in setting.skipped.items():
        print(f"\nNot measured: {what}: {why}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="tvm", help="edge's engine")
    parser.add_argument("--model", default="smollm2-135m", help="GGUF file or installed name, made all Q4_0")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--isa", help="EDGE_ISA for edge's workers, such as avx2")
    parser.add_argument("--openvino-python", metavar="DIR", help="venv (or interpreter) with openvino-genai")
    parser.add_argument("--cache", type=Path, default=Path(platformdirs.user_cache_dir("edge")) / "benchmarks")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--starts", type=int, default=7, help="fresh processes per engine for the start row")
    parser.add_argument("--rows", default="", help="only rows whose names contain one of these words, with commas")
    parser.add_argument("--large", action="store_true", help="also a random 1.0-billion-weight Llama (0.6 GB file)")
    parser.add_argument("--busy", action="store_true", help="also decode with every core occupied")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see whether everything runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    return parser.parse_args()


def main() -> None:
    options = parse()
    openvino, reason = find_openvino(options.openvino_python)
    setting = Setting(
        backend=options.backend,
        isa=options.isa,
        threads=options.threads,
        openvino=openvino,
        cache=options.cache.absolute(),
        sizes=TINY if options.tiny else Sizes(),
        rounds=options.rounds,
        starts=options.starts,
        wanted=tuple(filter(None, options.rows.split(","))),
    )
    if reason:
        setting.skip(OPENVINO, "all rows", reason)
    about, bandwidth = machine(), memory_bandwidth(options.threads)
    source = find_model(options.model).absolute()
    model = pure_file(setting, source)
    rows = list(model_rows(setting, model, "", True, options.busy))
    rows += fresh_rows(setting, model)
    if options.large:
        rows += model_rows(setting, large_file(setting, source), "large: ", False, False)
    bandwidth = max(bandwidth, memory_bandwidth(options.threads))  # at its best, as the engines are
    for row in rows:
        if row.unit == _BANDWIDTH:
            row.share_of = dict.fromkeys(row.runs, bandwidth / 1e9)
    if options.json:
        shown = {"backend": setting.backend, "isa": setting.isa, "threads": setting.threads, "rounds": setting.rounds}
        print(json.dumps({
            "machine": about, "settings": shown, "versions": setting.versions, "bandwidth_bytes_s": bandwidth,
            "rows": [row.to_dict() for row in rows], "skipped": setting.skipped, "foreign_cpu": setting.foreign,
        }, ensure_ascii=False))  # fmt: skip
    else:
        print_report(setting, about, bandwidth, rows)


if __name__ == "__main__":
    main()
