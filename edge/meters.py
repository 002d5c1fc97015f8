"""Takes the samples that the governor decides by, does the waiting, and keeps the account of joules and heat."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from edge.devices.memory import memory_use
from edge.devices.power.base import Reading
from edge.devices.thermal import read_celsius
from edge.governor import Limits, Sample, State, Stop, decide

_COST = 200  # a reading may take 1/200 of the time: 0.5 %
_STEPS_PER_PEAK = 32  # reading VmHWM takes 40 µs: often enough to notice, too rarely to cost
_THERMAL_S = 0.2
_FIRST_TOKENS = 16  # of a prompt, while nobody knows what one costs


class EnergyMeter(Protocol):
    """Joules since some moment; edge.devices.power.find_meter has the device's best."""

    def add_bytes(self, count: float) -> None:
        """So many were read from memory, for estimates."""
        ...

    def read(self) -> Reading: ...


class Watch:
    """Over one generation. `limits.energy` counts from the moment it is made."""

    def __init__(
        self,
        limits: Limits,
        meter: EnergyMeter,
        thermometer: Path | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
        read_peak: Callable[[], int] = lambda: memory_use().peak,
    ) -> None:
        self._limits, self._meter, self._thermometer = limits, meter, thermometer
        self._clock, self._sleep, self._read_peak = clock, sleep, read_peak
        self.first = self.reading = meter.read()
        self._read_at, self._watts, self._interval = clock(), 0.0, 0.0
        self._felt_at = -_THERMAL_S
        self._steps = 0
        self.paused = 0.0  # seconds
        self.hottest: float | None = None  # °C
        self._state = State(Sample(self._read_at, 0.0))

    def stop_reason(self, tokens: int = 1) -> Stop | None:
        """Wait as long as the limits want it. Why the run must stop now, or None. tokens: run since the last call."""
        self._steps += 1
        while True:
            decision, self._state = decide(self._limits, self._state, self._sample(), tokens)
            if decision.stop or not decision.pause:
                return decision.stop
            self._sleep(decision.pause)
            self.paused += decision.pause
            tokens = 0

    def affordable(self, tokens: int) -> int:
        """How many of these tokens of a prompt the energy left will pay; few while nobody knows what one costs."""
        if self._limits.energy is None:
            return tokens
        if not self._state.token:
            return min(tokens, _FIRST_TOKENS)
        left = self._limits.energy - (self._state.last.joules or 0.0)
        return max(0, min(tokens, int(left / self._state.token)))

    @property
    def budget(self) -> float | None:
        """Joules."""
        return self._limits.energy

    def joules(self) -> float:
        """Since the watch began, read now."""
        self._read(self._clock())
        return self.reading.joules - self.first.joules

    def _sample(self) -> Sample:
        now = self._clock()
        peak = self._read_peak() if self._limits.memory is not None and self._steps % _STEPS_PER_PEAK == 1 else None
        if now - self._read_at >= self._interval:
            self._read(now)
        joules = self.reading.joules - self.first.joules + self._watts * (now - self._read_at)
        return Sample(now, joules, peak, self._feel(now))

    def _read(self, now: float) -> None:
        """The more a reading costs, the rarer it is; in between, the last watts go on."""
        before, at = self.reading.joules, self._read_at
        self.reading = self._meter.read()
        self._watts = max(0.0, self.reading.joules - before) / (now - at) if now > at else self._watts
        self._read_at = now
        self._interval = _COST * (self._clock() - now)

    def _feel(self, now: float) -> float | None:
        if self._thermometer is None or now - self._felt_at < _THERMAL_S:
            return None
        self._felt_at = now
        celsius = read_celsius(self._thermometer)
        if celsius is not None:
            self.hottest = max(celsius, self.hottest or celsius)
        return celsius
