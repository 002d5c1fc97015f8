"""Benchmarks: prompt processing (pp) and token generation (tg), at depths of context.

Tests are named as llama-bench names them: `pp512`, `tg128`, `tg128 @ d4096`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge.errors import InputError
from edge.run.budgets.meters import EnergyMeter
from edge.run.history import Phase, remember_phase
from edge.run.report import Team, team_since
from edge.run.sampling.sampler import greedy
from edge.run.session import Session
from edge.types import IntArray


@dataclass(frozen=True)
class BenchTest:
    """Process `prompt` tokens, or generate `generate`, on top of `depth` tokens of context."""

    prompt: int
    generate: int
    depth: int

    @property
    def name(self) -> str:
        test = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{test} @ d{self.depth}" if self.depth else test

    @property
    def rows(self) -> int:
        """KV rows that the test needs."""
        return self.depth + self.prompt + self.generate


@dataclass(frozen=True)
class BenchRow:
    """The result of a test."""

    model: str
    size: int
    params: int
    backend: str
    threads: int
    test: str
    speed: float  # measured tokens per second: mean over repetitions
    sd: float  # standard deviation over repetitions
    joules: float | None = None  # per token
    energy_kind: str | None = None  # "counter", "integrated" or "estimate"
    energy_source: str | None = None
    team: Team | None = None  # of engines whose threads give way

    def to_dict(self) -> dict[str, Any]:
        """With llama-bench's column names, except for its t/s."""
        energy = {} if self.joules is None else {"J/token": round(self.joules, 6), "energy": self.energy_kind}
        return {
            "model": self.model,
            "size": self.size,
            "params": self.params,
            "backend": self.backend,
            "threads": self.threads,
            "test": self.test,
            "tok/s": round(self.speed, 2),
            "sd": round(self.sd, 2),
            **({} if self.team is None else {"team": list(self.team.passes), "team_why": self.team.why}),
            **energy,
        }


def make_tests(prompts: Sequence[int], generates: Sequence[int], depths: Sequence[int]) -> list[BenchTest]:
    """All prompt lengths and generation lengths at every depth, without zeros. Raises InputError if none is left."""
    tests = []
    for depth in depths:
        tests += [BenchTest(n, 0, depth) for n in prompts if n]
        tests += [BenchTest(0, n, depth) for n in generates if n]
    if not tests:
        raise InputError("nothing to measure: give -p or -n a number greater than 0")
    return tests


def run_bench(
    session: Session,
    tests: Sequence[BenchTest],
    repetitions: int = 5,
    on_step: Callable[[str], None] | None = None,
    meter: EnergyMeter | None = None,
) -> Iterator[BenchRow]:
    """Run the tests on a session with policy full, yielding each row as measured. meter: the session's own, for joules
    per token.

    The context of a depth is filled once, behind the model's prefix, and the cache truncated to it after every
    repetition. One warm-up run before the first test is not counted.
    """
    rng = np.random.default_rng(0)
    longest = max(test.rows for test in tests)
    tokens = rng.integers(0, session.spec.vocab, longest, dtype=np.int32)
    session.reset()
    session.forward(tokens[:2], upcoming=1)
    session.reset()
    prefix = session.model.prefix.ids if session.model.prefix else tokens[:0]
    for test in tests:
        _fill(session, np.concatenate([prefix, tokens[: test.depth]]))
        mark, speeds, joules, team = session.mark(hold=True), [], 0.0, session.team
        for repetition in range(repetitions):
            if on_step:
                on_step(f"{test.name} {repetition + 1}/{repetitions}")
            before = meter.read().joules if meter else 0.0
            speeds.append(_measure(session, test, tokens[test.depth :]))
            joules += meter.read().joules - before if meter else 0.0
            session.rewind(mark)
        reading = meter.read() if meter else None
        yield BenchRow(
            model=session.spec.label + (f" + LoRA {session.lora.size.rank}" if session.lora else ""),
            size=session.spec.weight_bytes,
            params=session.spec.parameters,
            backend=session.plan.backend,
            threads=session.plan.config.threads,
            test=test.name,
            speed=statistics.fmean(speeds),
            sd=statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
            joules=joules / (repetitions * (test.prompt + test.generate)) if meter else None,
            energy_kind=reading.kind if reading else None,
            energy_source=reading.source if reading else None,
            team=team_since(team, session.team),
        )


def remember_bench(session: Session, test: BenchTest, row: BenchRow) -> None:
    """Record a result for later predictions."""
    tokens = test.prompt or test.generate
    joules = None if row.joules is None else row.joules * tokens
    phase = Phase(tokens, tokens / row.speed, test.depth + tokens / 2, joules)
    kind, source = row.energy_kind, row.energy_source
    remember_phase(session.spec, session.plan, phase, prompt=bool(test.prompt), kind=kind, source=source,
                   team=row.team)  # fmt: skip


def _fill(session: Session, context: IntArray) -> None:
    """Fill the cache with exactly this context, after the rows of a shorter one."""
    kv = session.engine.kv
    if kv.length > context.size:
        session.reset()
    if context.size > kv.length:
        session.forward(context[kv.length :], upcoming=1)


def _measure(session: Session, test: BenchTest, tokens: IntArray) -> float:
    started = time.perf_counter()
    if test.prompt:
        session.forward(tokens[: test.prompt], upcoming=1)
    step = tokens[:1].copy()
    for _ in range(test.generate):
        session.make_room(1)
        step[0] = greedy(session.forward(step, upcoming=1))
    return (test.prompt + test.generate) / (time.perf_counter() - started)
