"""Takes the samples for the governor's decisions, waits out its pauses, and records joules and heat."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edge.devices.memory import memory_use
from edge.devices.memory.pressure import read_pressure
from edge.devices.power import sensors_root
from edge.devices.power.base import Reading
from edge.devices.thermal import Zone, read_celsius, zones
from edge.errors import UnsupportedError
from edge.run.budgets.governor import THERMAL_S, MemoryReading, RunLimits, Sample, State, Stop, affordable, decide
from edge.run.report import StopReason

_COST = 200  # readings may take 1/200 of the time: 0.5 %
_UNREAD = 0.05  # share of the energy left that may be spent between two readings, or else a single token
_STEPS_PER_PEAK = 32  # reading VmHWM takes 40 µs
PRESSURE_S = 0.5


class EnergyMeter(Protocol):
    """Joules since a fixed moment; edge.devices.power.find_meter returns the device's best meter."""

    def add_bytes(self, count: float) -> None:
        """Count bytes that were read from memory, for estimates."""
        ...

    def read(self) -> Reading: ...


def find_zone(limit: float | None) -> Zone | None:
    """The processor's thermometer, or None. Raises UnsupportedError if there is a limit, in °C, and no thermometer."""
    found = next(iter(zones(sensors_root())), None)
    if limit is not None and found is None:
        raise UnsupportedError("--max-temp cannot be kept: this device shows no temperature in /sys/class/thermal")
    return found


class Spender(Protocol):
    """An owner of memory, part of which it can return to the system."""

    needed: int  # the planned peak of the process, in bytes

    @property
    def spare(self) -> int:
        """The part of these bytes that can be returned."""
        ...

    def give(self, nbytes: int, cause: str) -> None:
        """Return about this many bytes to the system."""
        ...


class Watch:
    """Enforces the limits of one generation. `limits.energy` counts from the construction of the watch.

    whole: the meter for a power limit, where `meter` counts only a share of its joules. spender: returns memory when
    the device, whose readings lie below `root`, is short of it. ended: returns a stop reason if the run was asked to
    end, which also ends a pause, or None. obey: carries out requests of other threads before a pass.
    """

    def __init__(
        self,
        limits: RunLimits,
        meter: EnergyMeter,
        thermometer: Path | None = None,
        *,
        whole: EnergyMeter | None = None,
        spender: Spender | None = None,
        root: Path = Path("/"),
        ended: Callable[[], StopReason | None] = lambda: None,
        obey: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        read_peak: Callable[[], int] = lambda: memory_use().peak,
    ) -> None:
        self.limits, self._meter, self._thermometer = limits, meter, thermometer
        self._whole = whole if limits.power is not None else None
        self._spender, self._root, self._ended, self._obey = spender, root, ended, obey
        self._clock, self._sleep, self._read_peak = clock, sleep, read_peak
        self.first = self.reading = meter.read()
        self._read_at, self._interval, self._unread = clock(), 0.0, 0
        self._celsius_at = -THERMAL_S
        self._memory_at, self._memory_interval = -PRESSURE_S, PRESSURE_S
        self._steps = 0
        self.paused = 0.0  # seconds
        self.hottest: float | None = None  # °C
        self._state = State(Sample(self._read_at, 0.0, drawn=self._drawn()))
        self._decides = limits != RunLimits() or thermometer is not None or spender is not None

    def before_pass(self, tokens: int) -> StopReason | None:
        """Wait, return memory or stop, as budgets, the device and callers require. Returns why the run must stop, or
        None. tokens: run since the last call."""
        reason = self.stop_reason(tokens) if self._decides else None
        self._obey()
        return self._ended() or reason

    def ends_now(self) -> StopReason | None:
        """Why the run must stop now, or None. Never waits."""
        return self._ended() or self.spent()

    def stop_reason(self, tokens: int = 1) -> Stop | None:
        """Wait as the limits require. Returns why the run must stop, or None. tokens: run since the last call."""
        self._steps += 1
        self._unread += tokens
        worked = True
        while True:
            sample = self._sample(worked)
            counted = 0 if not worked else tokens if sample.joules is None else self._unread
            if sample.joules is not None:
                self._unread = 0
            decision, self._state = decide(self.limits, self._state, sample, counted)
            if decision.give and decision.cause and self._spender is not None:
                self._spender.give(decision.give, decision.cause)
            if decision.stop or not decision.pause or self._ended():
                return decision.stop
            self._sleep(decision.pause)
            self.paused += decision.pause
            worked = False

    def pay(self) -> None:
        """Wait until the last tokens, too, are within the power limit, unless the run was asked to end."""
        if self.limits.power is not None and not self._ended():
            self._interval = 0.0  # the meter is read at once
            self.stop_reason()

    def spent(self) -> Stop | None:
        """The budget that is spent, time or energy, or None. For calls between tokens: never waits."""
        now = self._clock()
        if self.limits.deadline is not None and now >= self.limits.deadline:
            return "time"
        if self.limits.energy is not None and now - self._read_at >= self._interval:
            self._read(now)
            if self.reading.joules - self.first.joules > self.limits.energy:
                return "energy"
        return None

    def affordable(self, tokens: int) -> int:
        """The number of these tokens that may run in one pass, by the time and the energy left."""
        return affordable(self.limits, self._state, tokens, self._clock(), self.reading.joules - self.first.joules)

    def joules(self) -> float:
        """Joules since the watch began, by a new reading."""
        self._read(self._clock())
        return self.reading.joules - self.first.joules

    def _sample(self, worked: bool) -> Sample:
        now = self._clock()
        peak = self._read_peak() if self.limits.memory is not None and self._steps % _STEPS_PER_PEAK == 1 else None
        joules = None
        if not worked or now - self._read_at >= self._interval or self._nears_the_limit():
            self._read(now)
            joules = self.reading.joules - self.first.joules
        drawn = None if joules is None else self._drawn()
        return Sample(now, joules, peak, self._read_celsius(now), self._read_memory(now), drawn)

    def _drawn(self) -> float | None:
        return None if self._whole is None else self._whole.read().joules

    def _nears_the_limit(self) -> bool:
        """Whether the energy spent since the last reading may exceed `_UNREAD` of the energy left."""
        if self.limits.energy is None:
            return False
        left = self.limits.energy - (self._state.last.joules or 0.0)
        return not self._state.token or self._unread * self._state.token > _UNREAD * left

    def _read(self, now: float) -> None:
        """Read the meter, and set the interval to the next reading by the duration of this one."""
        self.reading, self._read_at = self._meter.read(), now
        self._interval = _COST * (self._clock() - now)

    def _read_memory(self, now: float) -> MemoryReading | None:
        if self._spender is None or now - self._memory_at < self._memory_interval:
            return None
        self._memory_at, pressure, use = now, read_pressure(self._root), memory_use()
        memory = MemoryReading(
            self._spender.needed,
            self._spender.spare,
            use.anonymous,
            pressure.limit,
            None if pressure.free is None else pressure.free + use.rss,
            pressure.stalled,
        )
        self._memory_interval = max(PRESSURE_S, _COST * (self._clock() - now))
        return memory

    def _read_celsius(self, now: float) -> float | None:
        if self._thermometer is None or now - self._celsius_at < THERMAL_S:
            return None
        self._celsius_at = now
        celsius = read_celsius(self._thermometer)
        if celsius is not None:
            self.hottest = max(celsius, self.hottest or celsius)
        return celsius
