"""Takes the samples that the governor decides by, does the waiting, and keeps the account of joules and heat."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edge.devices.memory import memory_use
from edge.devices.power.base import Reading
from edge.devices.pressure import read_pressure
from edge.devices.thermal import read_celsius
from edge.run.governor import MemoryReading, RunLimits, Sample, State, Stop, affordable, decide

_COST = 200  # a reading may take 1/200 of the time: 0.5 %
_UNREAD = 0.05  # of the energy left may be spent without a reading, unless it is a single token
_STEPS_PER_PEAK = 32  # reading VmHWM takes 40 µs: often enough to notice, too rarely to cost
_THERMAL_S = 0.2
_PRESSURE_S = 0.5


class EnergyMeter(Protocol):
    """Joules since some moment; edge.devices.power.find_meter has the device's best."""

    def add_bytes(self, count: float) -> None:
        """Count bytes that were read from memory, for estimates."""
        ...

    def read(self) -> Reading: ...


class Spender(Protocol):
    """Who takes memory, and can give some back."""

    @property
    def needed(self) -> int:
        """Bytes that the process takes at most, as counted."""
        ...

    @property
    def spare(self) -> int:
        """Bytes of these that can be given back."""
        ...

    def give(self, nbytes: int, cause: str) -> None:
        """Return about this many bytes to the system."""
        ...


class Watch:
    """Over one generation. `limits.energy` counts from the moment it is made.

    spender: gives memory back when it is short on this device, which is read below `root`. ended: whether the run is to
    end, whatever it waits for.
    """

    def __init__(
        self,
        limits: RunLimits,
        meter: EnergyMeter,
        thermometer: Path | None = None,
        *,
        spender: Spender | None = None,
        root: Path = Path("/"),
        ended: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        read_peak: Callable[[], int] = lambda: memory_use().peak,
    ) -> None:
        self._limits, self._meter, self._thermometer = limits, meter, thermometer
        self._spender, self._root, self._ended = spender, root, ended
        self._clock, self._sleep, self._read_peak = clock, sleep, read_peak
        self.first = self.reading = meter.read()
        self._read_at, self._interval, self._unread = clock(), 0.0, 0
        self._felt_at = -_THERMAL_S
        self._pressed_at, self._pressure_interval = -_PRESSURE_S, _PRESSURE_S
        self._steps = 0
        self.paused = 0.0  # seconds
        self.hottest: float | None = None  # °C
        self._state = State(Sample(self._read_at, 0.0))

    def stop_reason(self, tokens: int = 1) -> Stop | None:
        """Wait as long as the limits want it. Why the run must stop now, or None. tokens: run since the last call."""
        self._steps += 1
        self._unread += tokens
        worked = True
        while True:
            sample = self._sample(worked)
            counted = 0 if not worked else tokens if sample.joules is None else self._unread
            if sample.joules is not None:
                self._unread = 0
            decision, self._state = decide(self._limits, self._state, sample, counted)
            if decision.give and decision.cause and self._spender is not None:
                self._spender.give(decision.give, decision.cause)
            if decision.stop or not decision.pause or self._ended():
                return decision.stop
            self._sleep(decision.pause)
            self.paused += decision.pause
            worked = False

    def spent(self) -> Stop | None:
        """The budget that has run out, if one has, while no token runs: nothing is waited for."""
        now = self._clock()
        if self._limits.deadline is not None and now >= self._limits.deadline:
            return "time"
        if self._limits.energy is not None and now - self._read_at >= self._interval:
            self._read(now)
            if self.reading.joules - self.first.joules > self._limits.energy:
                return "energy"
        return None

    def affordable(self, tokens: int) -> int:
        """How many of these tokens of a prompt may be run at once, by the time and the energy left."""
        return affordable(self._limits, self._state, tokens, self._clock(), self.reading.joules - self.first.joules)

    @property
    def watts_limit(self) -> float | None:
        return self._limits.power

    def joules(self) -> float:
        """Since the watch began, read now."""
        self._read(self._clock())
        return self.reading.joules - self.first.joules

    def _sample(self, worked: bool) -> Sample:
        now = self._clock()
        peak = self._read_peak() if self._limits.memory is not None and self._steps % _STEPS_PER_PEAK == 1 else None
        joules = None
        if not worked or now - self._read_at >= self._interval or self._nears_the_limit():
            self._read(now)
            joules = self.reading.joules - self.first.joules
        return Sample(now, joules, peak, self._feel(now), self._press(now))

    def _nears_the_limit(self) -> bool:
        """What has been spent since the last reading may matter to the energy that is left."""
        if self._limits.energy is None:
            return False
        left = self._limits.energy - (self._state.last.joules or 0.0)
        return not self._state.token or self._unread * self._state.token > _UNREAD * left

    def _read(self, now: float) -> None:
        """The more a reading costs, the rarer it is."""
        self.reading, self._read_at = self._meter.read(), now
        self._interval = _COST * (self._clock() - now)

    def _press(self, now: float) -> MemoryReading | None:
        if self._spender is None or now - self._pressed_at < self._pressure_interval:
            return None
        self._pressed_at, pressure, use = now, read_pressure(self._root), memory_use()
        memory = MemoryReading(
            self._spender.needed,
            self._spender.spare,
            use.anonymous,
            pressure.limit,
            None if pressure.free is None else pressure.free + use.rss,
            pressure.stalled,
        )
        self._pressure_interval = max(_PRESSURE_S, _COST * (self._clock() - now))
        return memory

    def _feel(self, now: float) -> float | None:
        if self._thermometer is None or now - self._felt_at < _THERMAL_S:
            return None
        self._felt_at = now
        celsius = read_celsius(self._thermometer)
        if celsius is not None:
            self.hottest = max(celsius, self.hottest or celsius)
        return celsius
