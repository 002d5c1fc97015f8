"""Memory that becomes short while a session runs: what is read, what is decided, what is given back, what is said."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import GOLDEN, open_golden, run_child, some_tokens
from test_devices import write

from edge.devices.memory.pressure import Pressure, read_pressure
from edge.errors import ShortMemoryError
from edge.prompt_cache.cache import PromptCache
from edge.run.budgets.governor import MemoryReading, RunLimits, Sample, State, decide
from edge.run.reporting import check_memory
from edge.run.session import Session
from edge.run.starting.loading import load

MIB = 1 << 20
ROWS = 512  # of the golden models' context; 256 are the fewest
PLENTY = "MemAvailable: 99999999 kB\n"


def psi(some: float, full: float = 0.0) -> str:
    return (
        f"some avg10={some:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10={full:.2f} avg60=0.00 avg300=0.00 total=1\n"
    )


# What is read


def test_tightest_limit_and_worst_stall_count(tmp_path: Path) -> None:
    assert read_pressure(Path("/nowhere")) == Pressure(None, None, None)
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "proc/meminfo", "MemAvailable: 300 kB\n")
    write(tmp_path, "proc/pressure/memory", psi(1.5, 90))
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "5000000\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.high", "max\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.high", "4000000\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.pressure", psi(12.25))
    assert read_pressure(tmp_path) == Pressure(4_000_000, 300 * 1024, 12.25)


def test_cgroups_of_version_1_and_damaged_pressure(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:memory:/x\n0::/y\n")
    write(tmp_path, "sys/fs/cgroup/memory/x/memory.limit_in_bytes", "7000000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path, "sys/fs/cgroup/unified/y/memory.pressure", psi(3))
    assert read_pressure(tmp_path) == Pressure(7_000_000, None, 3.0)
    for text in ("", "some\n", "some avg10=\n", "some avg10=much\n", "full avg10=3.0\n"):
        write(tmp_path, "sys/fs/cgroup/unified/y/memory.pressure", text)
        assert read_pressure(tmp_path).stalled is None


# What is decided


def given_back(memories: list[MemoryReading], every: float = 0.5) -> list[int]:
    """The amounts that decisions over these readings give back, without waiting."""
    state, gone, gave = State(Sample(0.0)), 0, []
    for number, memory in enumerate(memories, start=1):
        memory = replace(memory, needed=memory.needed - gone, spare=max(0, memory.spare - gone))
        decision, state = decide(RunLimits(), state, Sample(number * every, memory=memory), 1)
        assert decision.give <= memory.spare
        gave.append(decision.give)
        gone += decision.give
        if decision.stop:
            return [*gave, -1]
    return gave


CALM = MemoryReading(
    needed=200 * MIB, spare=100 * MIB, private=90 * MIB, limit=300 * MIB, available=400 * MIB, stalled=0.0
)


def test_memory_given_back_under_limits() -> None:
    quiet = replace(CALM, limit=None, available=None, stalled=None)
    fallen, short = replace(CALM, limit=180 * MIB), replace(CALM, available=150 * MIB)
    killed = replace(CALM, limit=50 * MIB, private=60 * MIB)
    steps = [replace(CALM, limit=limit * MIB) for limit in (220, 200, 190, 185, 170, 150, 300)]
    for readings, gave in (
        ([CALM] * 100, [0] * 100), ([quiet] * 100, [0] * 100),  # without need
        ([CALM, CALM, fallen, fallen, fallen], [0, 0, 26, 0, 0]), (steps, [0, 0, 16, 0, 20, 20, 0]),
        ([replace(CALM, limit=99 * MIB, private=60 * MIB)] * 4, [100, 0, 0, 0]),  # weights can be reclaimed
        ([killed] * 4, [100, 0, -1]), ([replace(killed, private=None)] * 3, [100, 0, 0]),
        ([CALM, short, CALM, short, CALM, short], [0] * 6), ([short] * 3, [0, 56, 0]),  # for a moment, or longer
        ([replace(CALM, available=90 * MIB, private=60 * MIB)] * 3, [0, 100, 0]),  # no more than there is
    ):  # fmt: skip
        assert given_back(readings) == [each if each < 0 else each * MIB for each in gave]


def test_spikes_of_pressure_and_pressure_alone() -> None:
    spike = [replace(CALM, stalled=share) for share in (0, 3, 30, 25, 18, 12, 9, 6, 3, 1, 0, 0)]
    assert [each for each in given_back(spike) if each] == [50 * MIB]
    thrashing = replace(CALM, stalled=95.0, spare=0)
    assert given_back([thrashing] * 100) == [0] * 100


# Sessions on fake trees


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device with plenty of memory, whose files are read before every token."""
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "proc/meminfo", PLENTY)
    monkeypatch.setenv("EDGE_SENSORS", str(tmp_path))
    monkeypatch.setattr("edge.run.budgets.meters.PRESSURE_S", 0.0)
    monkeypatch.setattr("edge.run.budgets.meters._COST", 0)
    return tmp_path


def golden_session(policy: str = "streaming", rows: int = ROWS, **options: object) -> Session:
    model = open_golden("llama-gqa-untied").model
    return load(model, kv_policy=policy, max_kv_size=rows, prefill_step_size=32, threads=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["streaming", "adakv"])
def test_falling_limit_shrinks_cache_and_continues(tree: Path, policy: str) -> None:
    with golden_session(policy) as session:
        needed = session.plan.bytes.total
        pieces = session.stream(some_tokens(400), max_tokens=80, ignore_eos=True)
        for _ in range(20):
            next(pieces)
        write(tree, "sys/fs/cgroup/memory.max", str(needed - 1))
        rest = "".join(pieces)
        assert rest
        report = session.report
        assert (report.stop_reason, report.tokens.generated) == ("length", 80)
        (action,) = report.actions
        assert (action.action, action.left, action.reason) == ("shrink", 256, "limit")
        assert 20 <= action.token <= 22
        assert 0 < action.bytes < report.plan["bytes"]["kv"]
        assert report.kv.capacity == 256
        assert report.kv.rows <= 256 or policy == "adakv"  # of the longest head
        assert report.memory.kv == session.engine.kv.nbytes
        session.generate(some_tokens(40), max_tokens=5, ignore_eos=True)
        assert session.report.actions == ()
        assert session.report.kv.capacity == 256


def test_pressure_halves_spare_memory(tree: Path) -> None:
    write(tree, "proc/pressure/memory", psi(40))
    with golden_session() as session:
        session.generate(some_tokens(40), max_tokens=30, ignore_eos=True)
        actions = {each.action: each for each in session.report.actions}
    assert (actions["shrink"].left, actions["shrink"].reason) == (384, "pressure")
    assert actions["chunk"].left == 16
    assert len(session.report.actions) == 2


def test_falling_limit_within_a_long_prompt(tree: Path) -> None:
    count = 600
    with golden_session("streaming") as session:
        needed = session.plan.bytes.total

        def fall(done: int, total: int) -> None:
            if done > total // 2:
                write(tree, "sys/fs/cgroup/memory.max", str(needed - 1))

        session.generate(some_tokens(count), max_tokens=20, ignore_eos=True, on_prefill=fall)
        report = session.report
        assert (report.stop_reason, report.tokens.generated) == ("length", 20)
        assert [each.action for each in report.actions] == ["chunk", "shrink"]
        assert report.kv.rows <= report.kv.capacity == 256


def test_memory_pressure_cuts_the_answer(tree: Path) -> None:
    with golden_session() as session:
        pieces = session.stream(some_tokens(30), max_tokens=50, ignore_eos=True)
        first = next(pieces)
        write(tree, "sys/fs/cgroup/memory.max", "1000")
        text = first + "".join(pieces)
        report = session.report
    assert (report.stop_reason, report.text) == ("memory", text)
    assert 0 < report.tokens.generated < 5
    with pytest.raises(ShortMemoryError, match=r"^the answer is cut after \d tokens: memory is short: close other"):
        check_memory(report)
    over = replace(report, memory=replace(report.memory, budget=report.memory.peak_rss - MIB))
    with pytest.raises(
        ShortMemoryError, match=r"the peak of [\d.]+ [MG]iB \(measured\) is above the memory budget of [\d.]+ [MG]iB"
    ):
        check_memory(over)


_SHORT = """
import itertools, sys
from edge.run.budgets import governor
from edge.cli import main

stops = itertools.chain([None] * 8, itertools.repeat("memory"))
governor._stop = lambda *readings: next(stops)
sys.argv[:2] = ["edge", "run", sys.argv[1], *"hello -n 30 --ignore-eos --backend reference --threads 1 --json".split()]
main()
"""


def test_edge_run_fails_if_memory_cuts_answer() -> None:
    child = run_child(_SHORT, GOLDEN / "llama-gqa-tied.gguf")
    assert child.status == 5
    assert child.output["error"]["type"] == "ShortMemoryError"
    assert child.errors.splitlines()[-1].startswith("edge: the answer is cut after ")


# session.trim and session.terminate


def test_trim_gives_prompt_caches_memory_first() -> None:
    cache = PromptCache(memory="8MiB")
    with golden_session(prompt_cache=cache) as session:
        session.generate(some_tokens(200), max_tokens=3, ignore_eos=True)
        assert cache._tree.nbytes > 0
        session.trim(0.0)
        assert (cache.memory, session.engine.kv.capacity) == (8 * MIB, ROWS)
        session.trim(0.5)
        assert cache.memory < 5 * MIB
        assert session.engine.kv.capacity == ROWS
        session.trim(1.0)
        assert (cache.memory, cache._tree.nbytes, session.engine.kv.capacity) == (0, 0, 256)
        session.generate(some_tokens(200), max_tokens=3, ignore_eos=True)
        assert [each.action for each in session.report.actions] == ["prompt cache", "prompt cache", "shrink"]
        assert {each.reason for each in session.report.actions} == {"trim"}
        assert cache._tree.nbytes == 0


def test_trim_from_another_thread_while_answer_is_generated() -> None:
    with golden_session() as session:
        started = threading.Event()

        def trim() -> None:
            started.wait()
            for level in np.linspace(0, 1, 20):
                session.trim(float(level))

        thread = threading.Thread(target=trim)
        thread.start()
        for number, _ in enumerate(session.stream(some_tokens(500), max_tokens=400, ignore_eos=True)):
            if number == 3:
                started.set()
        thread.join()
        assert session.report.tokens.generated == 400
        assert session.engine.kv.capacity == 256
