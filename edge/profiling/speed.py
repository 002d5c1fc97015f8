"""How fast prompts and answers are, token by token, and how that changes with what is in the cache."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from edge.backends.base import Backend
from edge.prediction.work import Work, work_of
from edge.profiling.profile import Phase, Point, Spread
from edge.profiling.progress import OnStep
from edge.profiling.sampler import Sampler
from edge.run.meters import EnergyMeter
from edge.run.session import Session
from edge.sampling import greedy
from edge.types import FloatArray, IntArray

_MARGIN = 1.3  # longer contexts are slower than what was measured so far
_WARM_UP = (32, 4)  # tokens of a prompt and an answer
_LEAST_TOKENS = 4  # of an answer, however slow


@dataclass(frozen=True)
class Speeds:
    ttft: Spread
    prefill: Phase
    decode: Phase


class Runner:
    """Runs tokens in a session as `edge run` does, and times every pass."""

    def __init__(self, session: Session, backend: Backend, meter: EnergyMeter, sampler: Sampler) -> None:
        self.session, self.meter, self.sampler = session, meter, sampler
        self._footprint = backend.footprint(session.spec, session.plan.config)

    def prompt(self, tokens: IntArray) -> tuple[FloatArray, list[tuple[int, float]]]:
        """Logits after the last token; tokens and seconds of every pass."""
        session, passes = self.session, []
        size = session.plan.config.chunk
        for start in range(0, tokens.size, size):
            part = tokens[start : start + size]
            started = time.perf_counter()
            logits = session.forward(part, upcoming=1)
            passes.append((part.size, time.perf_counter() - started))
            self.sampler.rows = max(self.sampler.rows, session.engine.kv.length)
        return logits, passes

    def answer(self, logits: FloatArray, count: int, limit: float = math.inf) -> list[float]:
        """Seconds of every token, with its choice; fewer tokens if `limit` seconds are over."""
        session, seconds, step = self.session, list[float](), np.zeros(1, np.int32)
        for _ in range(count):
            if len(seconds) >= _LEAST_TOKENS and sum(seconds) > limit:
                break
            started = time.perf_counter()
            step[0] = greedy(logits)
            logits = session.forward(step, upcoming=1)
            seconds.append(time.perf_counter() - started)
        self.sampler.rows = max(self.sampler.rows, session.engine.kv.length)
        return seconds

    def work(self, tokens: int, context: int) -> Work:
        """Of one pass, counted."""
        return work_of(self.session.spec, self.session.plan.config, self._footprint, tokens, context)


def random_tokens(session: Session, count: int) -> IntArray:
    """The same every time."""
    return np.random.default_rng(0).integers(0, session.spec.vocab, count, dtype=np.int32)


def measure_speeds(
    runner: Runner, prompt: int, answer: int, repetitions: int, limit: float, on_step: OnStep
) -> Speeds:  # fmt: skip
    """A prompt of random tokens and an answer, so many times, or as often as `limit` seconds allow, but once. A short
    run before them is not counted."""
    session, tokens = runner.session, random_tokens(runner.session, prompt)
    first, passes, steps, spent = list[float](), list[tuple[int, float]](), list[float](), [0.0, 0.0]
    answering = 0.0
    _warm_up(runner, tokens, answer, on_step)
    begun = time.perf_counter()
    for repetition in range(repetitions):
        passed = time.perf_counter() - begun
        if repetition and passed * (1 + 1 / repetition) > limit:
            break
        on_step(f"prompt and answer {repetition + 1} of {repetitions}", max(repetition / repetitions, passed / limit))
        session.reset()
        before = runner.meter.read().joules
        runner.sampler.mark("prompt")
        started = time.perf_counter()
        logits, timed = runner.prompt(tokens)
        greedy(logits)
        first.append(time.perf_counter() - started)
        between = runner.meter.read().joules
        runner.sampler.mark("answer")
        started = time.perf_counter()
        steps += runner.answer(logits, answer, limit)
        answering += time.perf_counter() - started
        passes += timed
        spent[0] += between - before
        spent[1] += runner.meter.read().joules - between
    return Speeds(
        Spread.of(first),
        _prefill(runner, prompt, passes, spent[0] / (prompt * len(first))),
        replace(_decode(runner, prompt, answer, steps, spent[1] / len(steps)), watts=spent[1] / answering),
    )


def _warm_up(runner: Runner, tokens: IntArray, answer: int, on_step: OnStep) -> None:
    on_step("warm-up", 0.0)
    runner.session.reset()
    logits, _ = runner.prompt(tokens[: _WARM_UP[0]])
    runner.answer(logits, min(answer, _WARM_UP[1]))


def measure_curve(
    runner: Runner, contexts: Sequence[int], answer: int, seconds: float, on_step: OnStep
) -> tuple[list[Point], str | None]:
    """Answers at growing contexts, each filled once; why not all of them were reached in `seconds`, or None. Answers
    are shorter where an even part of the seconds is not enough for `answer` tokens."""
    session, points = runner.session, list[Point]()
    tokens, started, per_token = random_tokens(session, max(contexts, default=0)), time.perf_counter(), 0.0
    session.reset()
    for context in contexts:
        missing = context - session.engine.kv.length
        if time.perf_counter() - started + per_token * missing * _MARGIN > seconds:
            return points, f"context {context} would have taken longer than {seconds:g} s"
        on_step(f"context {context}", context / contexts[-1])
        runner.sampler.mark(f"context {context}")
        begun = time.perf_counter()
        logits, _ = runner.prompt(tokens[context - missing : context])
        per_token = (time.perf_counter() - begun) / missing
        steps = runner.answer(logits, answer, seconds / len(contexts) / 2)
        points.append(Point(context, Spread.of(steps), per_token))
        session.engine.kv.truncate(context)
    return points, None


def _prefill(runner: Runner, prompt: int, passes: list[tuple[int, float]], joules: float) -> Phase:
    chunk = min(runner.session.plan.config.chunk, prompt)
    work = Work(0, 0, 0)
    for start in range(0, prompt, chunk):
        work += runner.work(min(chunk, prompt - start), start)
    per_token = Spread.of([seconds / count for count, seconds in passes])
    return _phase("prefill", prompt, 0, chunk, per_token, joules, work, per_token.p50 * prompt)


def _decode(runner: Runner, prompt: int, answer: int, steps: list[float], joules: float) -> Phase:
    per_token = Spread.of(steps)
    return _phase("decode", answer, prompt, 1, per_token, joules, runner.work(1, prompt + answer // 2), per_token.p50)


def _phase(
    name: str, tokens: int, context: int, at_once: int, per_token: Spread, joules: float, work: Work, seconds: float
) -> Phase:
    return Phase(
        name="prefill" if name == "prefill" else "decode",
        tokens=tokens,
        context=context,
        at_once=at_once,
        per_token=per_token,
        joules_per_token=joules,
        bytes_per_s=work.bytes / seconds,
        flops_per_s=work.flops / seconds,
    )
