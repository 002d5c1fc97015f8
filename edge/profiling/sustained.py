"""Whether this device stays as fast as it begins: one long answer, window after window."""

from __future__ import annotations

import time

from edge.devices.load import others_from_now
from edge.profiling.profile import Climate, Spread, Sustained, Window
from edge.profiling.progress import OnStep
from edge.profiling.speed import Runner, random_tokens

_WINDOW_S = 60.0
_LEAST_WINDOWS = 5  # of shorter runs, whose windows are shorter, too
_BURST = 8  # tokens between two looks at the clock


def measure_sustained(runner: Runner, prompt: int, most: int, seconds: float, on_step: OnStep) -> Sustained:
    """Answers of up to `most` tokens to the same prompt, run once, for so many seconds without a pause."""
    session, sampler = runner.session, runner.sampler
    length = min(_WINDOW_S, seconds / _LEAST_WINDOWS)
    session.reset()
    sampler.mark("sustained")
    logits, _ = runner.prompt(random_tokens(session, prompt))
    first = logits.copy()  # each answer begins with it; the engine may write to its own
    windows: list[Window] = []
    began = time.perf_counter()
    while (start := time.perf_counter() - began) < seconds - length / 2:
        on_step(f"sustained, {start:.0f} of {seconds:.0f} s", start / seconds)
        steps: list[float] = []
        before, looked = runner.meter.read().joules, sampler.now()
        others = others_from_now()
        while not steps or time.perf_counter() - began < start + length:
            if session.engine.kv.length + _BURST > prompt + most:
                session.engine.kv.truncate(prompt)
            steps += runner.answer(first, _BURST)
        lasted = time.perf_counter() - began - start
        joules = (runner.meter.read().joules - before) / len(steps)
        sampler.feel()
        taken = others()
        felt = [each for each in sampler.climate if each.seconds >= looked]
        windows.append(_window(start, lasted, steps, joules, felt, taken))
    return Sustained(length, windows)


def _window(
    start: float, lasted: float, steps: list[float], joules: float, climate: list[Climate], others: float | None
) -> Window:  # fmt: skip
    """celsius: the highest; hertz: the mean."""
    celsius = [each.celsius for each in climate if each.celsius is not None]
    hertz = [each.hertz for each in climate if each.hertz is not None]
    return Window(
        start,
        lasted,
        Spread.of(steps),
        joules,
        max(celsius, default=None),
        sum(hertz) / len(hertz) if hertz else None,
        others,
    )
