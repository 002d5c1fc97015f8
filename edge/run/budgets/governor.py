"""One decision per step, from readings alone: continue, pause, return memory, or stop because a budget is spent.

Nothing here reads a clock or a sensor, so recorded and simulated devices can replace real ones; meters.py takes the
samples and waits.

A leaky bucket limits power: the run pauses until energy spent above the allowance is paid off. A PI controller limits
temperature: from the distance to the limit it sets the duty cycle, the share of time in which the device works, since
heat lags behind work by a minute.

If less memory is available than the plan needs, the run returns the difference; under memory pressure, half of the
spare memory at a time. The run stops only if the system is about to kill it.
"""

from __future__ import annotations

from math import inf
from typing import Literal

from edge.records import dataclass

Stop = Literal["time", "memory", "energy", "power", "thermal"]
Cause = Literal["limit", "free memory", "pressure"]

CREDIT_S = 0.5  # the bucket's size: seconds of allowed power that may be saved up and spent at once
SHORTEST_PAUSE_S = 1e-3  # shorter pauses are deferred
LONGEST_PAUSE_S = 0.25  # after which readings are taken again
HOPELESS_S = 5.0  # consecutive pauses without lower power, after which the run stops
NO_COOLER_S = 15.0  # at the lowest duty without a lower temperature: sensors show whole degrees
CELSIUS_MARGIN = 1.5  # °C below the limit: sensors show whole degrees
GAIN, INTEGRAL = 0.1, 0.004  # share of time per °C, and per °C and second
THERMAL_S = 0.2  # between two corrections of the duty
LEAST_DUTY = 0.02
MEMORY_SLACK = 6 << 20  # bytes kept free beyond the need, as in plans
STALLED = 10.0  # per cent of the time: half of the spare memory is then returned …
SETTLE_S = 10.0  # … and again no sooner than a step can be seen in an average over 10 s
SHORT_READINGS = 2  # consecutive ones with too little free memory: other programs come and go
# Tokens of a prompt that run first, before the cost of a token in joules and in seconds is known.
FIRST_PAID, FIRST_TIMED = 1, 32
FORGET = 0.9  # decay per step of the costliest token's cost, so that a disturbed measurement loses its weight


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run; None: no limit."""

    deadline: float | None = None  # seconds on the samples' clock
    memory: int | None = None  # bytes, peak resident set
    energy: float | None = None  # joules
    power: float | None = None  # watts, on average over a second or so
    max_temp: float | None = None  # °C, of the hottest sensor


@dataclass(frozen=True)
class MemoryReading:
    """Bytes; None: unknown."""

    needed: int  # the planned peak of this process
    spare: int  # the part of it that can be returned
    private: int | None = None  # resident, and not reclaimable by the system
    limit: int | None = None  # of its cgroups
    available: int | None = None  # its resident set and the system's free memory
    stalled: float | None = None  # per cent of the time, see edge.devices.memory.pressure


@dataclass(frozen=True)
class Sample:
    """Readings between two steps. joules: of this run, since it began. None: not read this time, or no longer
    readable."""

    time: float
    joules: float | None = None
    peak: int | None = None
    celsius: float | None = None
    memory: MemoryReading | None = None
    drawn: float | None = None  # joules of all runs, which power limits count; None: there are no others


@dataclass(frozen=True)
class State:
    """Carried from sample to sample."""

    last: Sample
    token: float = 0.0  # joules of the costliest recent token
    ran: int = 0  # tokens of the last passes whose joules are known
    each: float = 0.0  # joules per token of these passes
    pace: float = 0.0  # seconds per token of the last pass
    debt: float = 0.0  # joules above the power limit
    idle: float = 0.0  # watts while pausing
    duty: float = 1.0  # the permitted share of working time
    rest: float = 0.0  # seconds to wait to keep the duty
    error: float | None = None  # °C below the limit, at the last correction
    corrected_at: float = 0.0
    paused: float = 0.0  # seconds of consecutive pauses
    coolest: float = inf  # °C, the lowest at the lowest duty …
    cooled_at: float = 0.0  # … and when it was first read
    short: int = 0  # consecutive readings with too little free memory
    gave_at: float = -SETTLE_S  # when memory was last returned because of pressure


@dataclass(frozen=True)
class Decision:
    """The governor's decision; by default, to continue."""

    stop: Stop | None = None  # the reason to end the run
    pause: float = 0.0  # seconds to wait before the next sample
    give: int = 0  # bytes to return first …
    cause: Cause | None = None  # … and the reason


_GO_ON = Decision()


def decide(limits: RunLimits, state: State, now: Sample, tokens: int) -> tuple[Decision, State]:
    """Decide the next step, and return the state for the next call. tokens: run since the last sample or, if this
    sample has joules, since the last one that had; 0: a pause is over."""
    last, elapsed = state.last, now.time - state.last.time
    spent = drawn = _since(last.joules, now.joules)
    if now.drawn is not None:
        drawn = _since(last.drawn, now.drawn)
    duty, error, corrected_at = _duty(limits, state, now)
    rest = 0.0
    if limits.max_temp is not None:
        rest = max(0.0, state.rest + elapsed * (1 / duty - 1) if tokens else state.rest - elapsed)
    debt = 0.0
    if limits.power is not None:
        debt = max(-limits.power * CREDIT_S, state.debt + drawn - limits.power * elapsed)
    coolest, cooled_at = _coolest(state, duty, now)
    short = _short(state, now.memory)
    give, cause = _give(state, now, short)
    counted = tokens if now.joules is not None else 0
    state = State(
        last=_newest(last, now),
        token=max(spent / tokens, state.token * FORGET) if counted else state.token,
        ran=counted or state.ran,
        each=spent / tokens if counted else state.each,
        pace=elapsed / tokens if tokens else state.pace,
        debt=debt,
        idle=state.idle if tokens or elapsed <= 0 or now.joules is None else drawn / elapsed,
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
    pause = 0.0 if pause <= SHORTEST_PAUSE_S else min(pause, LONGEST_PAUSE_S)
    return Decision(pause=pause, give=give, cause=cause) if pause or give else _GO_ON, state


def affordable(limits: RunLimits, state: State, tokens: int, now: float, spent: float) -> int:
    """The number of these tokens that may run in one pass, if `spent` joules are spent by the time `now`.

    Assumes that a larger pass than the last costs no more per token, and a smaller one no more than the costliest
    token. A pass may take half of the energy and the time left, since its true cost is known only afterwards: other
    programs may take the cores meanwhile.
    """
    if limits.deadline is not None:
        tokens = min(tokens, max(1, int((limits.deadline - now) / 2 / state.pace)) if state.pace else FIRST_TIMED)
    if limits.energy is None:
        return tokens
    if not state.token:
        return min(tokens, FIRST_PAID)
    left = limits.energy - spent
    half = int(left / 2 / state.each) if state.each else tokens
    if half < state.ran:
        half = int(left / 2 / state.token)
    return min(tokens, max(half, left >= state.token))


def _since(before: float | None, now: float | None) -> float:
    return 0.0 if now is None or before is None else max(0.0, now - before)


def _newest(last: Sample, now: Sample) -> Sample:
    """The latest readings: `now`, with those of `last` where it has none."""
    return Sample(
        now.time,
        last.joules if now.joules is None else now.joules,
        last.peak if now.peak is None else now.peak,
        last.celsius if now.celsius is None else now.celsius,
        drawn=last.drawn if now.drawn is None else now.drawn,
    )


def _short(state: State, memory: MemoryReading | None) -> int:
    if memory is None:
        return state.short
    lacks = memory.available is not None and memory.needed > memory.available
    return state.short + 1 if lacks else 0


def _give(state: State, now: Sample, short: int) -> tuple[int, Cause | None]:
    """Bytes to return, and why: at once for a limit, only after several readings for free memory, which fluctuates."""
    memory = now.memory
    if memory is None or not memory.spare:
        return 0, None
    lacking = 0 if memory.limit is None else memory.needed - memory.limit
    if lacking > 0:
        return min(memory.spare, lacking + MEMORY_SLACK), "limit"
    if short >= SHORT_READINGS and memory.available is not None:
        return min(memory.spare, memory.needed - memory.available + MEMORY_SLACK), "free memory"
    if (memory.stalled or 0.0) >= STALLED and now.time - state.gave_at >= SETTLE_S:
        return -(-memory.spare // 2), "pressure"
    return 0, None


def _pause_for_power(limits: RunLimits, state: State) -> float:
    if limits.power is None or state.debt <= 0:
        return 0.0
    return state.debt / max(limits.power - state.idle, 0.1 * limits.power)


def _duty(limits: RunLimits, state: State, now: Sample) -> tuple[float, float | None, float]:
    """The duty, the distance to the limit (°C), and the time of their last correction; unchanged once the sensor has
    vanished."""
    if limits.max_temp is None or now.celsius is None or now.time - state.corrected_at < THERMAL_S:
        return state.duty, state.error, state.corrected_at
    error = limits.max_temp - CELSIUS_MARGIN - now.celsius
    if state.error is None:
        change = GAIN * min(0.0, error)  # a device that is too hot from the start
    else:
        change = GAIN * (error - state.error) + INTEGRAL * error * (now.time - state.corrected_at)
    return min(1.0, max(LEAST_DUTY, state.duty + change)), error, now.time


def _coolest(state: State, duty: float, now: Sample) -> tuple[float, float]:
    """The lowest temperature at the lowest duty, and when it was first read."""
    if duty > LEAST_DUTY:
        return inf, now.time
    if now.celsius is not None and now.celsius < state.coolest:
        return now.celsius, now.time
    return state.coolest, state.cooled_at


def _about_to_be_killed(memory: MemoryReading, short: int) -> bool:
    """Whether nothing is left to return, and the private memory reaches the limit. (The system can reclaim mapped
    weights, which is slow but no reason to stop.)"""
    if memory.spare or memory.private is None:
        return False
    available = memory.available if short >= SHORT_READINGS else None
    bounds = [bound for bound in (memory.limit, available) if bound is not None]
    return bool(bounds) and memory.private + MEMORY_SLACK > min(bounds)


def _stop(limits: RunLimits, state: State, now: Sample, pause: float) -> Stop | None:
    if limits.deadline is not None and now.time + pause >= limits.deadline:
        return "time"
    if limits.memory is not None and now.peak is not None and now.peak > limits.memory:
        return "memory"
    if now.memory is not None and _about_to_be_killed(now.memory, state.short):
        return "memory"
    joules = state.last.joules
    if limits.energy is not None and joules is not None and joules + state.token > limits.energy:
        return "energy"  # the next token would exceed it
    if limits.power is not None and state.paused > HOPELESS_S and state.idle >= limits.power:
        return "power"  # the device draws more even in pauses
    hot = state.last.celsius
    too_hot = limits.max_temp is not None and hot is not None and hot > limits.max_temp + 2
    if too_hot and now.time - state.cooled_at > NO_COOLER_S:
        return "thermal"  # pauses do not cool it
    return None
