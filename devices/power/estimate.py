"""Estimated energy where no sensor measures it, from CPU time and memory traffic, and their costs in the device's
profile.

busy core-seconds × watts of a core + seconds × idle watts + bytes read from memory × joules per byte. Costs that the
profile lacks count as 0. A child's CPU time counts once it has ended. A GPU's work counts as that of all cores of the
plan: no clock of the process shows it (in apps: `watch_gpu` of edge/apps/runtime/budgets/budgets.c).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from edge.devices.power.base import MeterKind, Reading, Scope
from edge.devices.profiles.profile import Power

_PICO = 1e-12
_on_gpu = [0.0]  # core-seconds, of all threads
_adding = Lock()


def _busy() -> float:
    """CPU seconds of this process and of the children that it waited for, and those counted for a GPU."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system + _on_gpu[0]


@contextmanager
def gpu_work(
    cores: int, clock: Callable[[], float] = time.monotonic, cpu: Callable[[], float] = time.process_time
) -> Iterator[None]:
    """While a GPU works, count `cores` as busy all along, less this process's CPU time, which counts anyway."""
    began, before = clock(), cpu()
    try:
        yield
    finally:
        spent = max(0.0, (clock() - began) * cores - (cpu() - before))
        with _adding:
            _on_gpu[0] += spent


class Estimate:
    """A meter that computes joules from CPU time, elapsed time and bytes read."""

    kind: MeterKind = "estimate"
    scope: Scope = "process"

    def __init__(
        self,
        power: Power,
        busy: Callable[[], float] = _busy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._power, self._busy, self._clock = power, busy, clock
        self.source = f"{power.profile} profile"
        self._busy_at, self._started = busy(), clock()
        self._bytes = 0
        self._last = (0.0, self._started)
        self._watts: float | None = None

    def add_bytes(self, count: float) -> None:
        """Count bytes read from memory."""
        self._bytes += int(count)

    def read(self) -> Reading:
        now = self._clock()
        joules = (
            (self._busy() - self._busy_at) * self._power.core_watts
            + (now - self._started) * self._power.idle_watts
            + self._bytes * self._power.dram_pj_per_byte * _PICO
        )
        before, at = self._last
        if now - at > 1e-3:
            self._watts, self._last = (joules - before) / (now - at), (joules, now)
        return Reading(joules, self._watts, self.source, self.kind, self.scope, 0)
