"""A counter that an app passes in, since some, such as Android's BatteryManager, serve only apps."""

from __future__ import annotations

import math
from collections.abc import Callable

from edge.devices.power.base import MeterKind, Reading, Scope, Unavailable


class AppCounter:
    """A meter over an app's function. joules: a counter that only grows; may raise any exception.

    The constructor raises Unavailable if the function raises or returns no number.
    """

    kind: MeterKind = "counter"

    def __init__(self, joules: Callable[[], float], source: str = "app", scope: Scope = "device") -> None:
        self.source, self.scope = source, scope
        self._count = joules
        self._first = self._last = self._now()
        self._samples = 0

    def read(self) -> Reading:
        now = self._now()
        if now < self._last:
            raise Unavailable("the app's counter went backwards")
        self._samples += now != self._last
        self._last = now
        return Reading(now - self._first, None, self.source, self.kind, self.scope, self._samples)

    def _now(self) -> float:
        try:
            now = float(self._count())
        except Exception as error:
            raise Unavailable(f"the app's counter failed ({type(error).__name__})") from None
        if not math.isfinite(now):
            raise Unavailable(f"the app's counter says {now}")
        return now
