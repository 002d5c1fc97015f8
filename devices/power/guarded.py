"""A meter that never stops counting: when its sensor fails, the estimate takes over, and the reading says so.

A counter that stands still while this process works counts as failed, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from edge.devices.power.base import Meter, Reading, Unavailable
from edge.devices.power.estimate import Estimate

_STUCK_S, _STUCK_J = 5.0, 1.0  # seconds, and joules by the estimate, for which a counter may stand still


class Guarded:
    """A meter with a fallback. stated: whether the user chose the meter."""

    def __init__(
        self, meter: Meter, estimate: Estimate, clock: Callable[[], float] = time.monotonic, *, stated: bool = False
    ) -> None:
        self._clock, self.stated = clock, stated
        self._before = 0.0  # joules by earlier meters
        self._moved_at = clock()
        self._meter: Meter | None = meter
        self._estimate = estimate
        self._measured = Reading(0.0, None, meter.source, meter.kind, meter.scope, 0)
        self._estimated = 0.0  # joules by the estimate when the sensor last moved

    def add_bytes(self, count: float) -> None:
        """Count bytes read from memory; only the estimate uses them."""
        self._estimate.add_bytes(count)

    def go_on_with(self, meter: Meter) -> None:
        """Continue with `meter`, which must be new."""
        self._before, self._estimated = self.read().joules, self._estimate.read().joules
        self._meter, self._moved_at = meter, self._clock()
        self._measured = Reading(0.0, None, meter.source, meter.kind, meter.scope, 0)

    def read(self) -> Reading:
        """Joules since the meter was made."""
        reading = self._read()
        return replace(reading, joules=reading.joules + self._before) if self._before else reading

    def _read(self) -> Reading:
        estimate = self._estimate.read()
        if self._meter is self._estimate:
            return estimate
        if self._meter is not None:
            try:
                reading = self._meter.read()
            except Unavailable:
                self._meter = None
            else:
                if not self._is_stuck(reading, estimate):
                    return reading
                self._meter = None
        joules = self._measured.joules + estimate.joules - self._estimated
        source = f"{self._measured.source}, then {estimate.source}"
        return Reading(joules, estimate.watts, source, "estimate", estimate.scope, self._measured.samples)

    def _is_stuck(self, reading: Reading, estimate: Reading) -> bool:
        now = self._clock()
        if reading.kind != "counter" or reading.samples != self._measured.samples:
            self._measured, self._estimated, self._moved_at = reading, estimate.joules, now
        return now - self._moved_at > _STUCK_S and estimate.joules - self._estimated > _STUCK_J
