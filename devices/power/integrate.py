"""Energy of a sensor that reports power, integrated by the trapezoidal rule."""

from __future__ import annotations

import time
from collections.abc import Callable

from edge.devices.power.base import MeterKind, Reading, Scope


class Integrated:
    """A meter over a power sensor. watts: reads the sensor; raises Unavailable when it fails."""

    kind: MeterKind = "integrated"

    def __init__(
        self, source: str, scope: Scope, watts: Callable[[], float], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.source, self.scope = source, scope
        self._read_watts, self._clock = watts, clock
        self._watts, self._at = watts(), clock()
        self._joules, self._samples = 0.0, 1

    def read(self) -> Reading:
        watts, at = self._read_watts(), self._clock()
        self._joules += (watts + self._watts) / 2 * (at - self._at)
        self._samples += watts != self._watts
        self._watts, self._at = watts, at
        return Reading(self._joules, watts, self.source, self.kind, self.scope, self._samples)
