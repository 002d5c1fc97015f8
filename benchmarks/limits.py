"""Tests that memory budgets are kept, or refused by BudgetError: random runs, each in a process with hard limits.

    python benchmarks/limits.py --runs 200 --seed 1 --workers 2
    python benchmarks/limits.py --runs 60 --first
    python benchmarks/limits.py --runs 100 --engine gpu
    python benchmarks/limits.py --runs 1000 --features --model smollm2-135m

Each run is `edge run` in a process of its own, which limits itself before it loads anything:

- RLIMIT_DATA: its current size (VmData) and the rest of the budget (budget − VmRSS), so that it cannot allocate one
  private page more than the budget allows. The limit counts reserved address space even if it is never touched:
  therefore stacks of threads are 1 MiB each, NumPy has multiplied once, for which OpenBLAS reserves tens of MiB, and
  ONNX Runtime gets 64 MiB on top. The cgroup counts only pages that are written to, and has no such allowance.
- a cgroup with memory.max (version 2) or memory.limit_in_bytes (1) of the budget, where one can be made.

Runs of the engine `gpu` are drawn from all software adapters, since their buffers and their compilers are in the
process. They have no RLIMIT_DATA, since drivers reserve much more than they touch: the peak is that of the process and
its children together, as with --first. Half of them find empty caches: the driver has compiled nothing, and edge has
kept the kernels' sources alone.

One prompt in six has 1 to 20 MB, more than any run can finish: --time ends it.

An outcome is `ok` (exit 0, peak resident set as the kernel counts it within the budget), `cut` (exit 3 because --time
was over within the prompt, the peak within the budget), `refused` (exit 3, the one line of a BudgetError), or a
failure: anything else. Before that, every engine has run every model once without limits, so that its compiled and
converted files exist.

With --near, budgets are those that are nearly met: from 1.00 to 1.15 × the need that `edge plan` names for the same
options, and prompts are long. RLIMIT_DATA is left out: the peak is that of the process, as the kernel counts it.

With --features, the native engine runs one model with whatever takes memory beside it: prompts up to the context, KV
dtypes, grammars, drafts, adapters, several sequences (`Session.batch`), in budgets between the smallest that edge names
without these features and twice the weights more. The peak is the larger of the report's and the kernel's. An answer
that memory ended is a failure, too (`memory`).

With --first, nothing is there before: each run has an empty cache folder, and compiles, packs and tries models as a
first run does. Its peak is that of the process and its children together, sampled every few milliseconds: the resident
set of the process now, and the peak so far of each child. A forked child shares its parent's pages, so only its private
ones count, and none while it has its parent's memory (vfork). RLIMIT_DATA would hold for each process on its own, and
is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path

from machine import files_folder, machine
from processes import Together

from edge.backends.tvm.gpu.hosts import all_adapters
from edge.devices.memory import cgroup_folders
from edge.lab.report.document import table
from edge.model.model import open_model
from edge.storage.cache import cache_folder

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"
MODELS = ("smollm2-135m", *(str(GOLDEN / f"{name}.gguf") for name in ("llama-gqa-untied", "qwen2")))
DTYPES = {
    "cpu": ("f16", "int8", "int4", "f32"),
    "llamacpp": ("f16", "q8_0", "q4_0", "f32"),
    "onnx": ("f16", "int8", "f32"),
    "reference": ("f32",),
    "gpu": ("f16", "int8", "int4", "f32"),
}
PLAIN, BY_KEYS = ("streaming", "window", "auto"), ("keydiff", "knorm")
ATTENTIVE, UNEVEN = ("h2o", "tova", "snapkv", "scissorhands"), ("pyramidkv", "adakv", "fastgen")
POLICIES = {
    "cpu": PLAIN + BY_KEYS + ATTENTIVE + UNEVEN,
    "llamacpp": PLAIN + ATTENTIVE,
    "onnx": PLAIN + BY_KEYS + ATTENTIVE,
    "reference": PLAIN,
    "gpu": PLAIN + BY_KEYS + ATTENTIVE,
}
TRIED = tuple(str(GOLDEN / f"{name}.gguf") for name in ("qwen3moe", "gpt-oss"))  # by llama.cpp, in a child
KEPT = ("ok", "cut", "refused")
MIB = 1 << 20
# Never written to: ONNX Runtime reserves by powers of two, 50 MiB, llama.cpp for its threads, 3 to 9 MiB (measured).
_UNTOUCHED = {"onnx": 64 * MIB, "llamacpp": 16 * MIB}
_TIMEOUT_S = 900

GRAMMARS = ("", "", "regex", "json_schema")
REGEX = "[ -~]*"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer"}}},
}
RANKS = (0, 0, 4, 16)  # of adapters; 0: none
CHARACTERS = 2  # of the prompt for each token of the context, about

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
        return ["run", self.model, "--raw", "--ignore-eos", *["--json"] * self.features, *given]

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


def random_case(chance: random.Random, engines: list[str], models: tuple[str, ...]) -> Case:
    """A combination that the engine supports; whether the memory suffices is left to chance."""
    model, engine = chance.choice(models), chance.choice(engines)
    policy, kv_dtype = chance.choice(POLICIES[engine]), chance.choice(DTYPES[engine])
    if policy in ATTENTIVE + UNEVEN and engine == "llamacpp":
        kv_dtype = chance.choice(("f16", "f32"))
    if model not in MODELS[:1] and kv_dtype in ("int4", "q8_0", "q4_0"):
        kv_dtype = DTYPES[engine][0]  # small heads do not divide into their blocks
    small = model != MODELS[0]
    slow = engine == "reference" and not small
    adapter = chance.choice(software_adapters()) if engine == "gpu" else ""
    rows = chance.choice((None, None, 64, 200, 300, 512)) if small else chance.choice((None, None, 256, 512, 1024))
    prompt, seconds = chance.choice((1, 30, 500, 2000, 400 if slow else 6000)), None
    if chance.random() < 1 / 6:
        prompt, seconds = chance.randrange(1_000_000, 20_000_000), chance.choice((4, 10))
    low, high = (75 if small else 150), (130 if small else 1000 if slow else 300)
    if adapter:  # between what a driver takes to show its adapters, and what a first run takes
        low, high = (140, 480) if small else (200, 700)
        if not (small or seconds):
            prompt = min(prompt, 200)  # a software adapter runs ten tokens a second, on a busy machine one
    return Case(
        model=model,
        engine=engine,
        policy=policy,
        kv_dtype=kv_dtype,
        budget=chance.randrange(low * MIB, high * MIB),
        prompt=prompt,
        tokens=chance.choice((1, 8, 40)),
        rows=rows,
        chunk=chance.choice((None, None, None, 1, 24)),
        seconds=seconds,
        adapter=adapter,
        uncompiled=bool(adapter) and chance.random() < 1 / 2,
    )


def first_case(chance: random.Random, engines: list[str], models: tuple[str, ...] = MODELS) -> Case:
    """A first run, with a budget around what compiling takes."""
    case = random_case(chance, engines, models)
    if case.engine == "llamacpp" and chance.random() < 0.5:
        case = replace(case, model=chance.choice(TRIED), policy="auto", kv_dtype="f16", rows=None, chunk=None)
    low, high = (75, 330) if case.model != MODELS[0] else (150, 520)
    if case.adapter:
        low, high = (250, 600) if case.model != MODELS[0] else (350, 800)
    return replace(case, budget=chance.randrange(low * MIB, high * MIB), prompt=min(case.prompt, 500), first=True)


def near_case(chance: random.Random, engines: list[str]) -> Case:
    """Its budget is a little more than what `edge plan` names: `plan_near` puts that in the place of a share."""
    case = random_case(chance, engines, MODELS[1:])
    prompt, tokens = chance.choice((500, 2000, 6000)), chance.choice((8, 40, 200))
    return replace(case, prompt=prompt, tokens=tokens, seconds=None, near=True)


def features_case(chance: random.Random, model: str) -> Case:
    """A run of the native engine with features that take memory. Its budget is stated as a share (`with_budget`)."""
    sequences = chance.choice((1, 1, 1, 3))
    case = Case(
        model=model,
        engine="cpu",
        policy=chance.choice(("streaming", "auto", *POLICIES["cpu"])),
        kv_dtype=chance.choice(DTYPES["cpu"][:2] if model in MODELS[1:] else DTYPES["cpu"]),
        budget=MIB,
        prompt=max(1, int(CHARACTERS * open_model(model).spec.context * chance.random() ** 2)),
        tokens=chance.choice((1, 8, 40, 100)),
        rows=None,
        chunk=None,
        features=True,
        grammar=chance.choice(GRAMMARS),
        rank=chance.choice(RANKS),
        speculate="off" if sequences > 1 else chance.choice(("auto", "off")),
        sequences=sequences,
    )
    return replace(case, share=chance.random())


@cache
def smallest(case: Case) -> int:
    """The smallest budget that edge names for a case."""
    said = re.search(r"(?:--memory |memory=\")([0-9]+)MiB", run(replace(case, budget=MIB), None).said)
    assert said is not None, case
    return int(said[1]) * MIB


def with_budget(case: Case) -> Case:
    """The case with a budget: the smallest, and `share` of twice the weights more."""
    alike = replace(case, policy="streaming", prompt=1, tokens=1, grammar="", rank=0, speculate="auto", share=0.0)
    return replace(case, budget=int(smallest(alike) + case.share * 2 * open_model(case.model).spec.weight_bytes))


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


def plan_near(case: Case, share: float) -> Case:
    """The case with `share` × the need of its plan as its budget."""
    _, model, _raw, _ignore_eos, *flags = case.arguments
    pairs = zip(flags[::2], flags[1::2], strict=True)
    given = [each for pair in pairs if pair[0] not in ("--memory", "-n") for each in pair]
    command = [sys.executable, "-m", "edge", "plan", model, *given, "--json"]
    with _surroundings(case) as environment:
        planned = subprocess.run(command, capture_output=True, text=True, check=True, cwd="/", env=environment)
    found = json.loads(planned.stdout)
    need = max(found["predicted_peak"] + found["bytes"]["reserve"], found["first_run"])
    return replace(case, budget=int(share * need))


def run(case: Case, group: Path | None) -> Outcome:
    """Run a case in a process of its own, with limits."""
    with _surroundings(case) as environment:
        return _run(case, group, environment)


@contextmanager
def _surroundings(case: Case) -> Iterator[dict[str, str]]:
    """The environment of a case, with caches of its own if those that exist know too much."""
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(case)
        if case.first or case.uncompiled:
            drivers = dict.fromkeys(("MESA_SHADER_CACHE_DIR", "POCL_CACHE_DIR"), folder)
            environment |= {"EDGE_CACHE": folder, **drivers}
        if case.uncompiled and not case.first:
            _copy_programs(Path(folder))
        yield environment


def _environment(case: Case) -> dict[str, str]:
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
    if status == 3 and said.strip().rpartition("\n")[2].startswith("edge: needs "):  # behind notes, if any
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


def available(engine: str) -> bool:
    package = {"cpu": "tvm", "gpu": "tvm", "llamacpp": "llama_cpp", "onnx": "onnxruntime"}.get(engine)
    return (package is None or find_spec(package) is not None) and (engine != "gpu" or bool(software_adapters()))


@cache
def software_adapters() -> list[str]:
    """Places of GPUs that are this CPU, such as wgpu:0."""
    return [adapter.place for adapter in all_adapters() if adapter.kind == "cpu"]


def warm_up(cases: list[Case]) -> None:
    """Compile and convert what the cases need, without limits."""
    needed = {
        (case.model, case.engine, case.adapter, case.kv_dtype, case.policy in ATTENTIVE + UNEVEN): case
        for case in cases
        if not case.features
    }
    designs = {(case.kv_dtype, case.rank > 0, case.speculate, case.sequences): case for case in cases if case.features}
    for number, case in enumerate(designs.values(), 1):
        print(f"compiled {number} of {len(designs)}", file=sys.stderr, flush=True)
        outcome = run(replace(case, policy="streaming", budget=0, prompt=1, tokens=1, rows=256, grammar=""), None)
        assert outcome.said == "" or "edge:" not in outcome.said, outcome.said
    for case in needed.values():
        if case.engine != "reference":
            arguments = ["run", case.model, "--raw", "-p", "a", "-n", "1", "--backend", case.engine, "--max-kv-size"]
            arguments += ["256", "--kv-dtype", case.kv_dtype, "--kv-policy", case.policy]
            if case.chunk:
                arguments += ["--prefill-step-size", str(case.chunk)]
            subprocess.run(
                [sys.executable, "-m", "edge", *arguments], capture_output=True, check=False, cwd="/",
                env=_environment(case),
            )  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--runs", type=int, default=200)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--workers", type=int, default=1, help="runs at once")
    options.add_argument("--first", action="store_true", help="first runs, with an empty cache folder each")
    options.add_argument("--near", action="store_true", help="budgets that are nearly met")
    options.add_argument("--features", action="store_true", help="grammars, drafts, adapters, sequences, long prompts")
    options.add_argument("--model", default=MODELS[0], help="of --features")
    options.add_argument("--engine", choices=tuple(DTYPES), action="append", help="those alone")
    options.add_argument("--warm", action="store_true", help="compiled and converted files exist already")
    options.add_argument("--json", type=Path, help="write every case and its outcome here")
    chosen = options.parse_args()
    chance, engines = random.Random(chosen.seed), chosen.engine or [each for each in DTYPES if available(each)]
    draw = first_case if chosen.first else near_case if chosen.near else partial(random_case, models=MODELS)
    model = str(Path(chosen.model).absolute()) if Path(chosen.model).exists() else chosen.model
    cases = [features_case(chance, model) if chosen.features else draw(chance, engines) for _ in range(chosen.runs)]
    if not (chosen.warm or chosen.first):
        warm_up(cases)
    if chosen.near:
        cases = [plan_near(case, chance.uniform(1.0, 1.15)) for case in cases]
    if chosen.features:
        cases = [with_budget(case) for case in cases]
    with ExitStack() as stack, ThreadPoolExecutor(chosen.workers) as workers:
        groups = [stack.enter_context(cgroup(number)) for number in range(chosen.workers)]
        held = "the peak of the process"
        if not (chosen.near or chosen.features):
            held = "the sampled peak of processes together" if chosen.first else "RLIMIT_DATA, or the peak of a gpu run"
        print(f"limits: {held}{' and a cgroup' if groups[0] else ' (no cgroup can be made here)'}", flush=True)
        outcomes: list[Outcome] = []
        for outcome in workers.map(lambda case: run_in(groups, case), cases):
            outcomes.append(outcome)
            if len(outcomes) % 5 == 0:
                print(f"{len(outcomes)} of {len(cases)} runs", file=sys.stderr, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    print(summary(outcomes))
    over, ended, refused = (
        sum(kind == each.kind for each in outcomes) for kind in ("beyond the budget", "memory", "refused")
    )
    count = len(outcomes)
    print(
        f"over budget: {over} of {count}, ended for memory by their own plan: {ended} of {count}, "
        f"refused: {refused} of {count}\n{machine()['cpu']}, {machine()['cores']} cores, {' '.join(machine()['isa'])}"
    )


def summary(outcomes: list[Outcome]) -> str:
    rows = []
    for engine in dict.fromkeys(_name(each.case) for each in outcomes):
        own = [each for each in outcomes if _name(each.case) == engine]
        kinds = Counter(each.kind for each in own)
        closest = max((each.peak / each.case.budget for each in own if each.kind in ("ok", "cut")), default=0.0)
        failed = len(own) - sum(kinds[each] for each in KEPT)
        rows.append([engine, *map(str, (len(own), *(kinds[each] for each in KEPT), failed)), f"{closest:.1%}"])
    return table(["engine", "runs", *KEPT, "failed", "highest peak / budget"], rows)


def _name(case: Case) -> str:
    return f"{case.engine}@{case.adapter}" if case.adapter else case.engine


if __name__ == "__main__":
    main()
