"""The speed of prefill and decode: token by token, at growing contexts, in a long run, and operator by operator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from edge.backends.base import Backend
from edge.backends.operators import by_name
from edge.devices.load import others_from_now
from edge.lab.prediction.work import Work, work_of
from edge.lab.profiling.memory import Sampler
from edge.lab.profiling.profile import EngineProfile, OperatorTime, Phase, PhaseOperators, Point, Settings
from edge.lab.profiling.sustained import Spread, Sustained, Window
from edge.model.model import Model
from edge.run.budgets.governor import RunLimits
from edge.run.budgets.meters import EnergyMeter, Watch
from edge.run.sampling.sampler import greedy
from edge.run.session import Session
from edge.types import FloatArray, IntArray

_MARGIN = 1.3  # on the predicted time of a longer context, which is slower per token than measured ones
_WARM_UP = (32, 4)  # tokens of a prompt and an answer
_LEAST_TOKENS = 4  # of an answer, however slow
_WINDOW_S = 60.0  # of a long run
_LEAST_WINDOWS = 5  # of shorter runs, whose windows are shorter, too
_BURST = 8  # tokens between two readings of the clock
_LONGEST_PASS = 128  # tokens of an instrumented pass of a prompt: longer passes repeat the same work
_OPERATOR_CONTEXT = 256  # rows in the cache for an answer's operators, which have to be run first
_PASSES = (2, 16)  # at least, at most
_INSTRUMENTED = 2.0  # assumed slowdown by instruments, on the safe side

OnStep = Callable[[str, float], None]
"""Called with the current step, and the share of it that is done, from 0 to 1."""


@dataclass(frozen=True)
class Speeds:
    ttft: Spread
    prefill: Phase
    decode: Phase


def part_of(on_step: OnStep, seconds: Sequence[float], number: int) -> OnStep:
    """Map the progress of part `number` to the progress of the whole. seconds: approximate duration of each part."""
    before, total = sum(seconds[:number]), sum(seconds)
    return lambda what, share: on_step(what, (before + seconds[number] * min(1.0, share)) / total)


class Runner:
    """Runs tokens in a session as `edge run` does, and times every pass."""

    def __init__(self, session: Session, backend: Backend, meter: EnergyMeter, sampler: Sampler) -> None:
        self.session, self.meter, self.sampler = session, meter, sampler
        self._footprint = backend.footprint(session.spec, session.plan.config)

    def prompt(self, tokens: IntArray) -> tuple[FloatArray, list[tuple[int, float]]]:
        """Run a prompt, int32 [n]. Returns logits after the last token, and tokens and seconds of every pass."""
        session, passes = self.session, []
        size = session.plan.config.chunk
        for start in range(0, tokens.size, size):
            part = tokens[start : start + size]
            started = time.perf_counter()
            logits = session.forward(part, upcoming=1)
            passes.append((part.size, time.perf_counter() - started))
            self.sampler.rows = max(self.sampler.rows, session.engine.kv.length)
        return logits, passes

    def answer(
        self, logits: FloatArray, count: int, limit: float = math.inf, watch: Watch | None = None
    ) -> list[float]:
        """Generate `count` tokens, fewer once `limit` seconds are over. Returns the seconds of each, including
        sampling. watch: pauses after each token."""
        session, seconds, step = self.session, list[float](), np.zeros(1, np.int32)
        for _ in range(count):
            if len(seconds) >= _LEAST_TOKENS and sum(seconds) > limit:
                break
            started = time.perf_counter()
            step[0] = greedy(logits)
            logits = session.forward(step, upcoming=1)
            seconds.append(time.perf_counter() - started)
            if watch and watch.stop_reason():
                break
        self.sampler.rows = max(self.sampler.rows, session.engine.kv.length)
        return seconds

    def work(self, tokens: int, context: int) -> Work:
        """The counted work of one pass."""
        return work_of(self.session.spec, self.session.plan.config, self._footprint, tokens, context)

    def random_tokens(self, count: int) -> IntArray:
        """Pseudo-random tokens, the same every time."""
        return np.random.default_rng(0).integers(0, self.session.spec.vocab, count, dtype=np.int32)


def measure_speeds(runner: Runner, prompt: int, settings: Settings, on_step: OnStep) -> Speeds:
    """Measure a prompt of random tokens and an answer, `repetitions` times or for `speed_s` seconds, at least once. A
    short warm-up is not counted."""
    session, meter, sampler = runner.session, runner.meter, runner.sampler
    tokens, answer, limit = runner.random_tokens(prompt), settings.answer, settings.speed_s
    first, passes, steps = list[float](), list[tuple[int, float]](), list[float]()
    answering = prompt_joules = answer_joules = 0.0
    on_step("warm-up", 0.0)
    session.reset()
    logits, _ = runner.prompt(tokens[: _WARM_UP[0]])
    runner.answer(logits, min(answer, _WARM_UP[1]))
    begun = time.perf_counter()
    for repetition in range(settings.repetitions):
        passed = time.perf_counter() - begun
        if repetition and passed * (1 + 1 / repetition) > limit:
            break
        share = max(repetition / settings.repetitions, passed / limit)
        on_step(f"prompt and answer {repetition + 1} of {settings.repetitions}", share)
        session.reset()
        before = meter.read().joules
        sampler.mark("prompt")
        started = time.perf_counter()
        logits, timed = runner.prompt(tokens)
        greedy(logits)
        first.append(time.perf_counter() - started)
        between = meter.read().joules
        sampler.mark("answer")
        started = time.perf_counter()
        steps += runner.answer(logits, answer, limit)
        answering += time.perf_counter() - started
        passes += timed
        prompt_joules += between - before
        answer_joules += meter.read().joules - between
    chunk = min(session.plan.config.chunk, prompt)
    read = sum((runner.work(min(chunk, prompt - start), start) for start in range(0, prompt, chunk)), Work(0, 0, 0))
    per_prompt_token = Spread.of([seconds / count for count, seconds in passes])
    per_token, each = Spread.of(steps), runner.work(1, prompt + answer // 2)
    return Speeds(
        Spread.of(first),
        Phase(
            name="prefill",
            tokens=prompt,
            context=0,
            at_once=chunk,
            per_token=per_prompt_token,
            joules_per_token=prompt_joules / (prompt * len(first)),
            bytes_per_s=read.bytes / (per_prompt_token.p50 * prompt),
            flops_per_s=read.flops / (per_prompt_token.p50 * prompt),
        ),
        Phase(
            name="decode",
            tokens=answer,
            context=prompt,
            at_once=1,
            per_token=per_token,
            joules_per_token=answer_joules / len(steps),
            bytes_per_s=each.bytes / per_token.p50,
            flops_per_s=each.flops / per_token.p50,
            watts=answer_joules / answering,
        ),
    )


def measure_curve(
    runner: Runner, contexts: Sequence[int], settings: Settings, on_step: OnStep
) -> tuple[list[Point], str | None]:
    """Measure answers at growing contexts, each filled once. Returns the points, and why not all contexts were reached
    in `curve_s` seconds, or None. Shortens answers that would exceed their share of the time."""
    session, seconds, points = runner.session, settings.curve_s, list[Point]()
    tokens, started, per_token = runner.random_tokens(max(contexts, default=0)), time.perf_counter(), 0.0
    session.reset()
    for context in contexts:
        missing = context - session.engine.kv.length
        if time.perf_counter() - started + per_token * missing * _MARGIN > seconds:
            return points, f"context {context} would have taken longer than {seconds:g} s"
        on_step(f"context {context}", context / contexts[-1])
        runner.sampler.mark(f"context {context}")
        begun = time.perf_counter()
        logits, _ = runner.prompt(tokens[context - missing : context])
        per_token, mark = (time.perf_counter() - begun) / missing, session.mark(hold=True)
        steps = runner.answer(logits, settings.answer, seconds / len(contexts) / 2)
        points.append(Point(context, Spread.of(steps), per_token))
        session.rewind(mark)
    return points, None


def measure_sustained(
    runner: Runner, prompt: int, most: int, settings: Settings, on_step: OnStep
) -> tuple[Sustained, bool]:
    """Measure repeated answers of up to `most` tokens to the same prompt, run once, for `sustained_s` seconds, with
    pauses that hold `watts`. Also returns whether the run ended early because pauses cannot hold them."""
    seconds = settings.sustained_s
    session, sampler = runner.session, runner.sampler
    length = min(_WINDOW_S, seconds / _LEAST_WINDOWS)
    session.reset()
    sampler.mark("sustained")
    logits, _ = runner.prompt(runner.random_tokens(prompt))
    mark = session.mark(hold=True)
    first = logits.copy()  # each answer begins with these logits; the engine may overwrite its own
    windows: list[Window] = []
    watch = None if settings.watts is None else Watch(RunLimits(power=settings.watts), runner.meter)
    hopeless, began = False, time.perf_counter()
    while not hopeless and (start := time.perf_counter() - began) < seconds - length / 2:
        on_step(f"sustained, {start:.0f} of {seconds:.0f} s", start / seconds)
        steps: list[float] = []
        before, looked = runner.meter.read().joules, sampler.now()
        others, paused = others_from_now(), watch.paused if watch else 0.0
        while not hopeless and (not steps or time.perf_counter() - began < start + length):
            if session.engine.kv.length + _BURST > prompt + most:
                session.rewind(mark)
            ran = runner.answer(first, _BURST, watch=watch)
            steps += ran
            hopeless = len(ran) < _BURST
        lasted = time.perf_counter() - began - start
        joules = (runner.meter.read().joules - before) / len(steps)
        sampler.sample_climate()
        taken = others()
        climate = [each for each in sampler.climate if each.seconds >= looked]
        hertz = [each.hertz for each in climate if each.hertz is not None]
        windows.append(
            Window(
                start=start,
                seconds=lasted,
                per_token=Spread.of(steps),
                joules_per_token=joules,
                celsius=max((each.celsius for each in climate if each.celsius is not None), default=None),
                hertz=sum(hertz) / len(hertz) if hertz else None,
                others=taken,
                paused=watch.paused - paused if watch else 0.0,
            )
        )
    return Sustained(length, windows), hopeless


def measure_operators(
    model: Model, backend: Backend, measured: EngineProfile, seconds: float, on_step: OnStep
) -> list[PhaseOperators]:
    """Measure the operators of a prompt's first pass and of a decoded token, in an instrumented engine, for about
    `seconds`, or longer for the minimum of passes. measured: for the times of passes. Raises UnsupportedError."""
    config, found = measured.plan.config, []
    longest = min(config.chunk, _LONGEST_PASS, config.capacity)
    context = max(0, min(_OPERATOR_CONTEXT, measured.prefill.tokens, config.capacity - 1))
    for part, (phase, tokens, rows) in enumerate(((measured.prefill, longest, 0), (measured.decode, 1, context))):
        on_step(f"operators of {phase.name}", part / 2)
        fewest, most = _PASSES
        passes = max(fewest, min(most, int(seconds / 2 / (_INSTRUMENTED * tokens * phase.per_token.p50))))
        operators = backend.operators(model.file, model.spec, config, tokens=tokens, context=rows, passes=passes)
        total = sum(each.seconds for each in operators) or 1.0
        times = [
            OperatorTime(e.name, e.phase, e.calls, e.seconds, e.seconds / total, e.bytes, e.flops, e.waited)
            for e in by_name(operators)
        ]
        found.append(PhaseOperators(phase.name, tokens, rows, times))
    return found
