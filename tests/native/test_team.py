"""Teams of threads that give way: the rule, and passes while cores come and go, processes stop, and threads die."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from conftest import GOLDEN, exhaustive
from lora_files import write_adapter

from edge.backends import engine_named
from edge.backends.base import AdaptedEngine, BatchedEngine, EngineConfig, VerifyingEngine
from edge.backends.tvm.cpu.arguments import LINE, LINES, MANY_STALLS, STALLS, Job
from edge.model.adapters.lora import open_lora
from edge.model.adapters.lora_file import LoraFile
from edge.model.model import open_model
from edge.types import FloatArray

MS = 1_000_000
CPU = engine_named("cpu")
DRAFTS = 7

# ---- the rule --------------------------------------------------------------------------------------------------------


class Rule:
    """`team.judge`, compiled, with a clock of its own; all times in milliseconds."""

    def __init__(self) -> None:
        tvm = pytest.importorskip("tvm")
        from tvm.script.ir_builder import IRBuilder
        from tvm.tirx.script.builder import ir as T  # noqa: N812

        from edge.backends.tvm.cpu.kernels import team

        with IRBuilder() as builder, T.prim_func(s_tir=True):
            T.func_name("judge")
            T.func_attr({"global_symbol": "judge"})
            job, *numbers = T.arg("job", T.handle()), *(T.arg(name, T.int64()) for name in "abcd")
            team.judge(T.match_buffer(job, (T.int64(len(Job.NAMES)),), "int64"), *numbers)
        module = tvm.IRModule({"judge": builder.get()})
        self._judge, self._tensor = tvm.compile(module, target=tvm.target.Target("llvm"))["judge"], tvm.runtime.tensor
        self.reset(2)

    def reset(self, threads: int) -> Rule:
        self.job, self.now = dict.fromkeys(Job.NAMES, 0), 0.0
        self.job |= {"threads": threads, "team": threads, "parts": threads}
        return self

    def run(self, passed: float, lost: float = 0, stalls: int = 0, passes: int = 1) -> int:
        """Passes of this kind; returns the size of the team after them."""
        for _ in range(passes):
            self.now += passed
            job = self._tensor(np.array(list(self.job.values()), np.int64))
            self._judge(job, *(int(each * MS) for each in (self.now, passed, lost)), stalls)
            self.job = dict(zip(Job.NAMES, map(int, job.numpy()), strict=True))
            self.job["threads"] = self.job["team"]
        return self.job["team"]

    @property
    def pause(self) -> int:
        """Until the team grows."""
        return self.job["grow_at"] // MS - int(self.now)


@pytest.fixture(scope="module")
def rule() -> Rule:
    return Rule()


def test_repeated_loss_costs_one_thread_at_a_time(rule: Rule) -> None:
    rule.reset(2).run(4, 3, 1)
    assert rule.run(4, 3, 1, passes=3) == 1
    assert rule.reset(2).run(8, 8, MANY_STALLS) == 1
    assert rule.run(8, 8, MANY_STALLS) == 1  # never none
    assert [rule.reset(8).run(8, 8, MANY_STALLS, passes=count) for count in (1, 2, 4)] == [7, 6, 4]
    assert rule.reset(8).run(10, 0.5, passes=100) == 8  # less than a thread is worth


def test_single_events_leave_the_team(rule: Rule) -> None:
    """As a stopped process, and a quota of three halves of a core, which is used up at every end of a period."""
    for threads in (2, 8):
        rule.reset(threads)
        for passed, lost, stalls in ((1, 0, 0), (6, 5, 1), (5000, 4999, 2), (300, 10, 60), *[(26, 25, 1)] * 20):
            assert rule.run(passed, lost, stalls) == threads, (passed, lost, stalls)
            assert rule.run(1, passes=74) == threads


def test_attempts_grow_rarer_until_one_succeeds(rule: Rule) -> None:
    rule.reset(2)
    pauses = []
    for _ in range(9):
        rule.job |= {"threads": 2, "team": 2, "changed": int(rule.now * MS)}
        rule.run(8, 8, MANY_STALLS)
        pauses.append(rule.pause)
        rule.now += pauses[-1]
    assert pauses == [8, 16, 32, 64, *[128] * 5]
    rule.job |= {"threads": 2, "team": 2, "changed": int(rule.now * MS)}
    rule.run(1, passes=200)
    rule.run(8, 8, MANY_STALLS)
    assert rule.pause == 8


def test_chunks_use_the_whole_team_under_time_pressure(rule: Rule) -> None:
    rule.reset(2).run(8, 8, MANY_STALLS)
    assert rule.job["scarce"] > 4 * MS  # until passes show that it is not
    assert rule.run(3, passes=60) == 1
    assert rule.job["scarce"] == 0
    rule.run(8, 4, passes=3)
    assert rule.job["scarce"] > 4 * MS
    before = rule.job["scarce"]
    rule.job["threads"] = 2  # as `begin_job` decides
    rule.run(300, 200)
    assert rule.job["scarce"] < before
    rule.run(2, passes=40)
    assert rule.job["scarce"] == 0


# ---- results ---------------------------------------------------------------------------------------------------------


def outputs(engine: Any, vocab: int, team: Callable[[int], None]) -> list[FloatArray]:
    """Logits of a prompt, steps, drafts and batches, before each of which `team` is told its number."""
    rng, found = np.random.default_rng(5), list[FloatArray]()
    text = rng.integers(0, vocab, 60).astype(np.int32)
    first, second = (engine.sequence(number) for number in (0, 1))
    for number, run in enumerate((
        lambda: first.forward(text[:37]),
        *[lambda at=at: first.forward(text[at : at + 1]) for at in (37, 38, 39)],
        lambda: second.forward(text[:20]),
        *[lambda at=at: engine.forward_batch(text[at : at + 2], [0, 1]) for at in (40, 42, 44)],
        lambda: cast(VerifyingEngine, first).verify(text[46:51]),
        lambda: cast(VerifyingEngine, first).verify(text[51:58]),
        lambda: first.forward(text[58:59]),
    )):  # fmt: skip
        team(number)
        found.append(np.array(run()))
    return found


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("llama-gqa-tied", 3),
        *(exhaustive(name, 0) for name in ("llama-gqa-tied", "qwen35", "qwen3moe", "falcon-h1", "gpt-oss")),
    ],
)  # fmt: skip
def test_logits_are_those_of_the_whole_team(name: str, rank: int, tmp_path: Path) -> None:
    model, found = open_model(GOLDEN / f"{name}.gguf"), []
    config = EngineConfig(96, 16, "f16", 3, sequences=8, drafts=DRAFTS, lora_rank=rank)  # as in test_batches.py
    for sizes in ([3], [1], [2, 1, 3, 1, 2]):
        with closing(cast(BatchedEngine, CPU.load(model.file, model.spec, config))) as engine:
            if rank:
                lora = open_lora((LoraFile(write_adapter(tmp_path / "a.gguf", model, rank)),), model.file, model.spec)
                cast(AdaptedEngine, engine).set_lora(lora)
            job = cast(Any, engine).passes.workers._job
            job[Job.slot("fixed")] = 1

            def team(number: int, job: Any = job, sizes: list[int] = sizes) -> None:
                job[Job.slot("threads")] = sizes[number % len(sizes)]

            found.append(outputs(engine, model.spec.vocab, team))
    for other in found[1:]:
        for number, (ours, expected) in enumerate(zip(other, found[0], strict=True)):
            assert (ours == expected).all(), number


@pytest.mark.parametrize("fixed", [0, 1])
def test_stalls_of_earlier_passes_are_forgotten(fixed: int) -> None:
    """Else threads would sleep at once at every barrier for the rest of the engine's life."""
    model, many = open_model(GOLDEN / "llama-gqa-tied.gguf"), 1 << 20
    with closing(cast(Any, CPU.load(model.file, model.spec, EngineConfig(512, 64, "f16", 2)))) as engine:
        workers = engine.passes.workers
        workers._job[Job.slot("fixed")] = fixed
        notes = workers._lines.reshape(LINES, -1, LINE)[2]
        notes[:, STALLS] = many
        engine.forward(np.ones(9, np.int32))
        assert (notes[:, STALLS] < many).all()


# ---- a process among others ------------------------------------------------------------------------------------------

CHILD = """
import hashlib, sys
import numpy as np
from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.model.model import open_model
model = open_model(sys.argv[1])
engine = engine_named("cpu").load(model.file, model.spec, EngineConfig(512, 64, "f16", 2))
found, rounds = set(), 0
print("ready", flush=True)
while rounds < 3 or int(sys.argv[2]) > rounds:
    engine.kv.truncate(0)
    text, digest = np.arange(3, 259, dtype=np.int32) % model.spec.vocab, hashlib.sha256()
    digest.update(engine.forward(text).tobytes())
    for _ in range(150):
        digest.update(engine.forward(text[:1]).tobytes())
    found.add(digest.hexdigest())
    rounds += 1
print(sum(engine.team), *sorted(found), flush=True)
engine.close()
"""


class Child:
    """A process that runs prompts and steps on two threads."""

    def __init__(self, rounds: int = 30) -> None:
        command = [sys.executable, "-c", CHILD, GOLDEN / "llama-gqa-tied.gguf", str(rounds)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def result(self) -> str:
        """The hash of its logits, which were the same in all rounds."""
        said, _ = self.process.communicate(timeout=240)
        passes, *found = said.split()
        assert self.process.returncode == 0
        assert int(passes) >= 3 * 151
        assert len(found) == 1
        return found[0]


@pytest.fixture(scope="module")
def expected() -> str:
    return Child(1).result()


@contextlib.contextmanager
def loops(count: int = 1) -> Iterator[list[subprocess.Popen[bytes]]]:
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield found
    finally:
        for each in found:
            each.kill()
            each.wait()


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")


@needs_linux
def test_neighbours_that_come_and_go(expected: str) -> None:
    child = Child()
    with loops(2) as neighbours:
        for number in range(4):
            for each in neighbours:
                each.send_signal(signal.SIGCONT if number % 2 else signal.SIGSTOP)
            time.sleep(0.2)
    assert child.result() == expected


@needs_linux
def test_two_threads_on_one_core(expected: str) -> None:
    child = Child()
    for task in Path(f"/proc/{child.process.pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {min(os.sched_getaffinity(0))})
    assert child.result() == expected


DYING = """
import ctypes, signal, sys, threading
import numpy as np
from edge.backends import engine_named
from edge.backends.base import EngineConfig
from edge.backends.tvm.cpu.arguments import Job
from edge.errors import EngineError
from edge.model.model import open_model
libc = ctypes.CDLL(None)
libc.signal(60, libc.syscall)  # SIGRTMIN + 26: the handler is called with 60, the number of the system call exit
model = open_model(sys.argv[1])
engine = engine_named("cpu").load(model.file, model.spec, EngineConfig(512, 64, "f16", 2))
engine.passes.workers._job[Job.slot("fixed")] = 1
engine.forward(np.ones(9, np.int32))
(other,) = [each for each in threading.enumerate() if each.name == "edge-worker"]
signal.pthread_kill(other.ident, 60)
for _ in range(2):
    try:
        engine.forward(np.ones(1, np.int32))
    except EngineError as error:
        print(error, flush=True)
engine.close()
"""


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="needs Linux on x86-64")
def test_thread_that_the_system_has_ended() -> None:
    command = [sys.executable, "-c", DYING, GOLDEN / "llama-gqa-tied.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["the system has ended a thread of the engine: load the model again"] * 2
    assert done.returncode == 0, done.stderr
