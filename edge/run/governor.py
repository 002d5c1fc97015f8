"""One decision per step, from readings alone: go on, pause, give memory back, or stop because a budget is spent.

Nothing here reads a clock or a sensor, so that recorded and simulated devices decide as real ones do; meters.py takes
the samples and waits.

Power is held by a leaky bucket: what was spent above the allowance is waited for. Temperature is held by the share of
time in which the device works, a PI controller on the distance to the limit: heat lags behind work by a minute.

Memory is given back when less may be had than the run was counted to need, as much as is lacking; and by halves of what
can be spared while something on the device waits for memory. Only what is about to be killed stops.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

Stop = Literal["time", "memory", "energy", "power", "thermal"]
Cause = Literal["limit", "free memory", "pressure"]

_CREDIT_S = 0.5  # seconds of allowed power that may be saved up and spent at once
_SHORTEST_PAUSE_S = 1e-3  # less is saved up
_LONGEST_PAUSE_S = 0.25  # then readings are taken again
_HOPELESS_S = 5.0  # of pauses in a row that did not bring power down
_NO_COOLER_S = 15.0  # at the least share of work without a lower temperature: sensors show whole degrees
_MARGIN = 1.5  # °C below the limit: sensors show whole degrees
_GAIN, _INTEGRAL = 0.1, 0.004  # share of time per °C, and per °C and second
_THERMAL_S = 0.2  # between two corrections
_LEAST_DUTY = 0.02
_SLACK = 6 << 20  # bytes that stay between what is needed and what may be had, as in plans
_STALLED = 10.0  # per cent of the time: then half of what can be spared is given back …
_SETTLE_S = 10.0  # … and again no sooner than a step can be seen in an average over 10 s
_SHORT_READINGS = 2  # in a row with too little free memory: others come and go
# Tokens of a prompt that are run first, before it is known what one costs in joules, in seconds.
_FIRST_PAID, _FIRST_TIMED = 1, 32
_FORGET = 0.9  # of the costliest token, at every step: one that was disturbed is not expected for ever


@dataclass(frozen=True, slots=True)
class RunLimits:
    """deadline: seconds on the samples' clock. memory: bytes, peak resident set. energy: joules. power: watts, on
    average over a second or so. celsius: of the hottest sensor. None: no limit."""

    deadline: float | None = None
    memory: int | None = None
    energy: float | None = None
    power: float | None = None
    celsius: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes. needed: what this process takes at most, as counted; spare: of these, what it can give back. private: what
    it has and the system cannot reclaim (None: not told). limit: of its cgroups. available: what the system has for it,
    all that it holds included. stalled: see edge.devices.pressure."""

    needed: int
    spare: int
    private: int | None = None
    limit: int | None = None
    available: int | None = None
    stalled: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Readings between two steps. joules: since the run began. None: not read this time, or not to be read any more."""

    time: float
    joules: float | None = None
    peak: int | None = None
    celsius: float | None = None
    memory: MemoryReading | None = None


@dataclass(frozen=True, slots=True)
class State:
    """What earlier samples left. token: joules of the costliest one, of late. ran: tokens of the last passes whose
    joules are known, each of which took `each`. pace: seconds that each token of the last pass took. debt: joules above
    the power limit. idle: watts while pausing. duty: share of time that may be worked. rest: seconds that are to be
    waited for it. paused: seconds of pauses in a row. coolest: °C since the least share is worked, read first at
    cooled_at. short: readings in a row with too little free memory. gave_at: when memory was last given back because of
    pressure."""

    last: Sample
    token: float = 0.0
    ran: int = 0
    each: float = 0.0
    pace: float = 0.0
    debt: float = 0.0
    idle: float = 0.0
    duty: float = 1.0
    rest: float = 0.0
    error: float | None = None
    corrected_at: float = 0.0
    paused: float = 0.0
    coolest: float = inf
    cooled_at: float = 0.0
    short: int = 0
    gave_at: float = -_SETTLE_S


@dataclass(frozen=True, slots=True)
class Decision:
    """stop: why, None to go on. pause: seconds to wait before the next sample, 0 to go on at once. give: bytes to give
    back first, because of `cause`."""

    stop: Stop | None = None
    pause: float = 0.0
    give: int = 0
    cause: Cause | None = None


_GO_ON = Decision()


def decide(limits: RunLimits, state: State, now: Sample, tokens: int) -> tuple[Decision, State]:
    """tokens: run since the last sample, or since the last that had joules if this one has; 0: a pause is over."""
    last, elapsed = state.last, now.time - state.last.time
    spent = 0.0 if now.joules is None or last.joules is None else max(0.0, now.joules - last.joules)
    duty, error, corrected_at = _duty(limits, state, now)
    rest = 0.0
    if limits.celsius is not None:
        rest = max(0.0, state.rest + elapsed * (1 / duty - 1) if tokens else state.rest - elapsed)
    debt = 0.0
    if limits.power is not None:
        debt = max(-limits.power * _CREDIT_S, state.debt + spent - limits.power * elapsed)
    coolest, cooled_at = _coolest(state, duty, now)
    short = _short(state, now.memory)
    give, cause = _give(state, now, short)
    counted = tokens if now.joules is not None else 0
    state = State(
        last=_newest(last, now),
        token=max(spent / tokens, state.token * _FORGET) if counted else state.token,
        ran=counted or state.ran,
        each=spent / tokens if counted else state.each,
        pace=elapsed / tokens if tokens else state.pace,
        debt=debt,
        idle=state.idle if tokens or elapsed <= 0 or now.joules is None else spent / elapsed,
        duty=duty,
        rest=rest,
        error=error,
        corrected_at=corrected_at,
        paused=0.0 if tokens else state.paused + elapsed,
        coolest=coolest,
        cooled_at=cooled_at,
        short=short,
        gave_at=now.time if cause == "pressure" else state.gave_at,
    )
    pause = max(_pause_for_power(limits, state), rest)
    if stop := _stop(limits, state, now, pause):
        return Decision(stop), state
    pause = 0.0 if pause <= _SHORTEST_PAUSE_S else min(pause, _LONGEST_PAUSE_S)
    return Decision(pause=pause, give=give, cause=cause) if pause or give else _GO_ON, state


def affordable(limits: RunLimits, state: State, tokens: int, now: float, spent: float) -> int:
    """How many of these tokens of a prompt may be run at once, if `spent` joules are gone by the time `now`.

    A pass of more tokens than the last one takes no more for each of them, one of fewer no more than the costliest
    token. It may take half of the energy that is left: what it really takes is known only afterwards.
    """
    if limits.deadline is not None:
        tokens = min(tokens, max(1, int((limits.deadline - now) / state.pace)) if state.pace else _FIRST_TIMED)
    if limits.energy is None:
        return tokens
    if not state.token:
        return min(tokens, _FIRST_PAID)
    left = limits.energy - spent
    half = int(left / 2 / state.each) if state.each else tokens
    if half < state.ran:
        half = int(left / 2 / state.token)
    return min(tokens, max(half, left >= state.token))


def _newest(last: Sample, now: Sample) -> Sample:
    """What was not read stays as it was."""
    return Sample(
        now.time,
        last.joules if now.joules is None else now.joules,
        last.peak if now.peak is None else now.peak,
        last.celsius if now.celsius is None else now.celsius,
    )


def _short(state: State, memory: MemoryReading | None) -> int:
    if memory is None:
        return state.short
    lacks = memory.available is not None and memory.needed > memory.available
    return state.short + 1 if lacks else 0


def _give(state: State, now: Sample, short: int) -> tuple[int, Cause | None]:
    """Bytes to give back, and why. A limit that fell is one at once; free memory goes up and down by itself."""
    memory = now.memory
    if memory is None or not memory.spare:
        return 0, None
    lacking = 0 if memory.limit is None else memory.needed - memory.limit
    if lacking > 0:
        return min(memory.spare, lacking + _SLACK), "limit"
    if short >= _SHORT_READINGS and memory.available is not None:
        return min(memory.spare, memory.needed - memory.available + _SLACK), "free memory"
    if (memory.stalled or 0.0) >= _STALLED and now.time - state.gave_at >= _SETTLE_S:
        return -(-memory.spare // 2), "pressure"
    return 0, None


def _pause_for_power(limits: RunLimits, state: State) -> float:
    if limits.power is None or state.debt <= 0:
        return 0.0
    return state.debt / max(limits.power - state.idle, 0.1 * limits.power)


def _duty(limits: RunLimits, state: State, now: Sample) -> tuple[float, float | None, float]:
    """The share of time, the distance to the limit (°C), and when they were corrected. A sensor that vanishes leaves
    all as it is."""
    if limits.celsius is None or now.celsius is None or now.time - state.corrected_at < _THERMAL_S:
        return state.duty, state.error, state.corrected_at
    error = limits.celsius - _MARGIN - now.celsius
    if state.error is None:
        change = _GAIN * min(0.0, error)  # a device that is too hot from the start
    else:
        change = _GAIN * (error - state.error) + _INTEGRAL * error * (now.time - state.corrected_at)
    return min(1.0, max(_LEAST_DUTY, state.duty + change)), error, now.time


def _coolest(state: State, duty: float, now: Sample) -> tuple[float, float]:
    """The lowest temperature since the least share is worked, and when it was first read."""
    if duty > _LEAST_DUTY:
        return inf, now.time
    if now.celsius is not None and now.celsius < state.coolest:
        return now.celsius, now.time
    return state.coolest, state.cooled_at


def _about_to_be_killed(memory: MemoryReading, short: int) -> bool:
    """Nothing is left to give, and what cannot be reclaimed is as much as may be had. (Weights that are mapped can be:
    that is slow, and no reason to stop.)"""
    if memory.spare or memory.private is None:
        return False
    available = memory.available if short >= _SHORT_READINGS else None
    bounds = [bound for bound in (memory.limit, available) if bound is not None]
    return bool(bounds) and memory.private + _SLACK > min(bounds)


def _stop(limits: RunLimits, state: State, now: Sample, pause: float) -> Stop | None:
    if limits.deadline is not None and now.time + pause >= limits.deadline:
        return "time"
    if limits.memory is not None and now.peak is not None and now.peak > limits.memory:
        return "memory"
    if now.memory is not None and _about_to_be_killed(now.memory, state.short):
        return "memory"
    joules = state.last.joules
    if limits.energy is not None and joules is not None and joules + state.token > limits.energy:
        return "energy"  # the next token would pass it
    if limits.power is not None and state.paused > _HOPELESS_S and state.idle >= limits.power:
        return "power"  # the device draws more even while it waits
    hot = state.last.celsius
    too_hot = limits.celsius is not None and hot is not None and hot > limits.celsius + 2
    if too_hot and now.time - state.cooled_at > _NO_COOLER_S:
        return "thermal"  # it gets no cooler while it waits
    return None
