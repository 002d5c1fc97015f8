"""A run of `edge run` in a process of its own, which limits its memory before it loads anything: see limits.py."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from machine import files_folder
from processes import Together

from edge.devices.memory import cgroup_folders
from edge.model.model import open_model
from edge.storage.cache import cache_folder

KEPT = ("ok", "cut", "refused")
MIB = 1 << 20
# Never written to: ONNX Runtime reserves by powers of two, 50 MiB, llama.cpp for its threads, 3 to 9 MiB (measured).
_UNTOUCHED = {"onnx": 64 * MIB, "llamacpp": 16 * MIB}
_TIMEOUT_S = 900
REGEX = "[ -~]*"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
}

# In the child: edge's own modules are there before anything is limited, engines and models are not.
_CHILD = """
import os, resource, sys
budget, untouched, group, first = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "first"
resource.setrlimit(resource.RLIMIT_STACK, (1 << 20, resource.getrlimit(resource.RLIMIT_STACK)[1]))
from edge.cli import main
import edge.cli.commands, edge.run.starting.loading, numpy
numpy.ones((300, 300), numpy.float32) @ numpy.ones((300, 300), numpy.float32)
with open("/proc/self/status") as file:
    fields = dict(line.split(":", 1) for line in file)
held, data = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmData"))
most = data + max(0, budget - held) + untouched
if not first:
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
if group:
    with open(group + "/cgroup.procs", "w") as file:
        file.write(str(os.getpid()))
if sys.argv[5] != "batch":
    sys.argv[:] = ["edge", *sys.argv[5:]]
    main()
    sys.exit()

import json, threading, edge
asked, text = json.loads(sys.argv[6]), sys.stdin.read()
grammar, model = asked["grammar"] and edge.Grammar(**asked["grammar"]), edge.open_model(asked["model"])
reports = []
try:
    if grammar:
        edge.check_grammar(grammar, model)
    with edge.load(model, **asked["options"]) as session, session.batch() as batch:
        def answer(number):
            said = batch.stream(
                text[number:], raw=True, ignore_eos=True, max_tokens=asked["tokens"], grammar=grammar or None
            )
            for _ in said: pass
            reports.append(said.report.to_dict())
        threads = [threading.Thread(target=answer, args=[each]) for each in range(asked["options"]["sequences"])]
        for each in threads: each.start()
        for each in threads: each.join()
except edge.EdgeError as error:
    print(f"edge: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
print(json.dumps(max(reports, key=lambda each: each["stop_reason"] == "memory")))
sys.exit(0 if len(reports) == len(threads) else 1)
"""

# Linux hands a process's peak down to its children: this process stands between us and the run. It kills a run that
# takes too long, and one that we have left, and waits for its end: what it holds would count against the next run.
_LAUNCHER = """
import ctypes, os, signal, sys
limit, program = int(sys.argv[1]), sys.argv[2:]
child, late = os.posix_spawn(program[0], program, os.environ), []
def kill(number, _frame):
    late.append(number)
    os.kill(child, signal.SIGKILL)
signal.signal(signal.SIGALRM, kill)
signal.signal(signal.SIGTERM, kill)
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG
signal.alarm(limit)
_, status, usage = os.wait4(child, 0)
print("late" if late else os.waitstatus_to_exitcode(status), usage.ru_maxrss)
"""


@dataclass(frozen=True)
class Case:
    """One run. budget: bytes. prompt: characters. rows: --max-kv-size, None to plan it. seconds: --time. adapter: of
    the engine gpu. uncompiled: no driver has compiled anything."""

    model: str
    engine: str
    policy: str
    kv_dtype: str
    budget: int
    prompt: int
    tokens: int
    rows: int | None
    chunk: int | None
    seconds: int | None = None
    first: bool = False
    near: bool = False
    adapter: str = ""
    uncompiled: bool = False
    features: bool = False
    grammar: str = ""  # a field of Grammar
    rank: int = 0  # of a LoRA adapter; 0: none
    speculate: str = "auto"
    sequences: int = 1
    pictures: tuple[str, ...] = ()  # files, for a model with eyes
    sounds: tuple[str, ...] = ()  # likewise
    mmproj: str = "mmproj.gguf"  # beside the model
    share: float = 0.0  # of the budget, between the smallest and twice the weights more

    @property
    def counts_children(self) -> bool:
        return self.first or bool(self.adapter)

    @property
    def arguments(self) -> list[str]:
        flags = {
            "--backend": self.engine, "--kv-policy": self.policy, "--kv-dtype": self.kv_dtype, "-n": self.tokens,
            "--memory": self.budget or None, "--max-kv-size": self.rows, "--prefill-step-size": self.chunk,
            "--time": None if self.seconds is None else f"{self.seconds}s",
            "--regex": REGEX if self.grammar == "regex" else None,
            "--json-schema": schema_file() if self.grammar == "json_schema" else None,
            "--lora": adapter_file(self.model, self.rank) if self.rank else None,
            "--speculate": "off" if self.speculate == "off" else None,
        }  # fmt: skip
        if self.sequences > 1:
            return ["batch", json.dumps(self._asked(flags))]
        given = [str(each) for flag, value in flags.items() if value is not None for each in (flag, value)]
        media = [("--image", file) for file in self.pictures] + [("--audio", file) for file in self.sounds]
        shown = ["--raw"] if not media else ["--mmproj", str(Path(self.model).with_name(self.mmproj))]
        shown += [each for pair in media for each in pair]
        return ["run", self.model, *shown, "--ignore-eos", *["--json"] * self.features, *given]

    def _asked(self, flags: dict[str, object]) -> dict[str, object]:
        """The run with several sequences, for the child's Python."""
        others = ("-n", "--regex", "--json-schema")
        options = {
            flag.strip("-").replace("-", "_"): value if isinstance(value, int) else str(value)
            for flag, value in flags.items()
            if value is not None and flag not in others
        }
        options |= {"sequences": self.sequences}
        grammar = {"regex": REGEX, "json_schema": SCHEMA}
        asked = {self.grammar: grammar[self.grammar]} if self.grammar else None
        return {"model": self.model, "options": options, "tokens": self.tokens, "grammar": asked}


@dataclass(frozen=True)
class Outcome:
    """kind: ok, cut, refused, or what went wrong. peak: bytes."""

    case: Case
    kind: str
    peak: int
    said: str


@cache
def schema_file() -> Path:
    path = files_folder() / "limits.json"
    path.write_text(json.dumps(SCHEMA))
    return path


@cache
def adapter_file(model: str, rank: int) -> Path:
    """A random adapter of all matrices."""
    from lora import write_adapter  # here: others need no gguf

    path = files_folder() / f"limits-{Path(model).stem}-{rank}.gguf"
    return path if path.exists() else write_adapter(path, open_model(model), rank)


def run(case: Case, group: Path | None) -> Outcome:
    """Run a case in a process of its own, with limits."""
    with surroundings(case) as environment:
        return _run(case, group, environment)


@contextmanager
def surroundings(case: Case) -> Iterator[dict[str, str]]:
    """The environment of a case, with caches of its own if those that exist know too much."""
    with tempfile.TemporaryDirectory() as folder:
        environment = environment_of(case)
        if case.first or case.uncompiled:
            drivers = dict.fromkeys(("MESA_SHADER_CACHE_DIR", "POCL_CACHE_DIR"), folder)
            environment |= {"EDGE_CACHE": folder, **drivers}
        if case.uncompiled and not case.first:
            _copy_programs(Path(folder))
        yield environment


def environment_of(case: Case) -> dict[str, str]:
    return {**os.environ, "EDGE_GPU": case.adapter} if case.adapter else dict(os.environ)


def _copy_programs(folder: Path) -> None:
    """Copy the kernels' sources into another cache folder, and nothing that a driver has made of them."""
    (folder / "kernels").mkdir(mode=0o700)
    for path in (cache_folder() / "kernels").glob("*.json*"):  # with the records of their completion
        shutil.copy2(path, folder / "kernels")


def _run(case: Case, group: Path | None, environment: dict[str, str]) -> Outcome:
    code = [
        sys.executable,
        "-c",
        _CHILD,
        str(case.budget),
        str(_UNTOUCHED.get(case.engine, 0)),
        str(group or ""),
        "first" if case.counts_children or case.near or case.features else "",
        *case.arguments,
    ]
    launcher = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(_TIMEOUT_S), *code], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace", cwd="/", env=environment,
    )  # fmt: skip
    with Together(launcher.pid) as together:
        output, said = launcher.communicate(_text(case.prompt))
    ended, kib = output.split()[-2:] or (str(launcher.returncode), "0")  # nothing if the launcher was killed
    peak = max(int(kib) * 1024, together.peak if case.counts_children else 0)
    if case.features and output.startswith("{"):
        report = json.loads(output.partition("\n")[0])
        peak = max(peak, report.get("memory", {}).get("peak_rss", 0))
        if report.get("stop_reason") == "memory":
            return Outcome(case, "memory", peak, said[-2000:])
    kind = "took too long" if ended == "late" else _kind(case, int(ended), peak, said)
    return Outcome(case, kind, peak, said[-2000:])


def run_in(groups: list[Path | None], case: Case) -> Outcome:
    """Run a case in a cgroup of its own; failures are printed at once."""
    group = groups.pop()
    try:
        if group:
            limit(group, case.budget)
        outcome = run(case, group)
    finally:
        groups.append(group)
    if outcome.kind not in KEPT:
        print(outcome.kind, " ".join(case.arguments), outcome.said.strip()[-300:], sep=" | ", flush=True)
    return outcome


def _kind(case: Case, status: int, peak: int, said: str) -> str:
    if case.features and status == 4 and "--max-tokens ends it" in said:
        status = 0  # JSON that -n cuts
    cut = status == 3 and case.seconds is not None and "--time " in said.strip().rpartition("\n")[2]
    if status == 0 or cut:
        return ("cut" if cut else "ok") if peak <= case.budget else "beyond the budget"
    last = said.strip().rpartition("\n")[2]  # behind notes, if any
    if status == 3 and last.startswith(("edge: needs ", "edge: looking at ", "edge: listening to ")):
        return "refused"
    if case.pictures and status == 2 and "while it is decoded" in last:
        return "refused"
    if "MemoryError" in said or "out of memory" in said:
        return "MemoryError"
    return "killed" if status < 0 else f"exit {status}"


def _text(characters: int) -> str:
    """Words of every length, most of them new to the tokenizer, which caches words."""
    chance = random.Random(characters)
    words = " ".join("".join(chance.choices("etaoinshrdlu", k=chance.randrange(1, 12))) for _ in range(40_000)) + " "
    return (words * (characters // len(words) + 1))[:characters]


@contextmanager
def cgroup(number: int) -> Iterator[Path | None]:
    """A cgroup below our own whose memory can be limited; None if none can be made."""
    for folder in cgroup_folders():
        if not ((folder / "memory.limit_in_bytes").exists() or (folder / "memory.max").exists()):
            continue
        group = folder / f"edge-limits-{os.getpid()}-{number}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            yield group if limit(group, 1 << 40) else None
        finally:
            group.rmdir()
        return
    yield None


def limit(group: Path, nbytes: int) -> bool:
    """Set the group's limit. False if it has none."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            (group / name).write_text(str(nbytes))
            return True
        except OSError:
            continue
    return False
