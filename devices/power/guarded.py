"""A meter that never stops counting: when its sensor fails, the estimate takes over, and the reading says so."""

from __future__ import annotations

from edge.devices.power.base import Meter, Reading, Unavailable
from edge.devices.power.estimate import Estimate


class Guarded:
    def __init__(self, meter: Meter, estimate: Estimate) -> None:
        self._meter: Meter | None = meter
        self._estimate = estimate
        self._measured = Reading(0.0, None, meter.source, meter.kind, meter.scope, 0)
        self._estimated = 0.0  # what the estimate said when the sensor was last read

    def add_bytes(self, count: float) -> None:
        """So many were read from memory; only the estimate wants to know."""
        self._estimate.add_bytes(count)

    def read(self) -> Reading:
        """Joules since the meter was made."""
        estimate = self._estimate.read()
        if self._meter is self._estimate:
            return estimate
        if self._meter is not None:
            try:
                self._measured, self._estimated = self._meter.read(), estimate.joules
                return self._measured
            except Unavailable:
                self._meter = None
        joules = self._measured.joules + estimate.joules - self._estimated
        source = f"{self._measured.source}, then {estimate.source}"
        return Reading(joules, estimate.watts, source, "estimate", estimate.scope, self._measured.samples)
