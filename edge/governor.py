"""One decision per step: go on, or stop because a budget is spent."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

from edge.devices.memory import memory_use

_STEPS_PER_READING = 32  # reading VmHWM takes 40 µs: often enough to notice, too rarely to cost


class Governor:
    """Watches a deadline (seconds on `clock`) and a memory limit (bytes, peak resident set). None is no limit."""

    def __init__(
        self,
        deadline: float | None,
        memory: int | None,
        clock: Callable[[], float] = time.perf_counter,
        read_peak: Callable[[], int] = lambda: memory_use().peak,
    ) -> None:
        self._deadline, self._memory = deadline, memory
        self._clock, self._read_peak = clock, read_peak
        self._steps = 0

    def stop_reason(self) -> Literal["time", "memory"] | None:
        """Why the run must stop now, or None."""
        if self._deadline is not None and self._clock() >= self._deadline:
            return "time"
        self._steps += 1
        if self._memory is not None and self._steps % _STEPS_PER_READING == 1 and self._read_peak() > self._memory:
            return "memory"
        return None
