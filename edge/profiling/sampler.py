"""Looks at this process and its device again and again while something else runs: memory, heat, the clock."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import TracebackType

from edge.devices.memory import memory_use
from edge.devices.power import sensors_root
from edge.devices.thermal import held_back, read_celsius, read_hertz, zones
from edge.profiling.profile import Climate, Mark, MemorySample

_MEMORY_S = 0.05  # between two looks, of 40 µs each
_CLIMATE_S = 1.0  # files of the kernel, some of which ask a slow sensor
_MOST = 600  # samples kept: then every second one goes, and looks become half as frequent


class Sampler:
    """A thread between `with` and its end. Times are seconds since it began. `rows`: set by whoever fills the cache."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or sensors_root()
        self._zone = next(iter(zones(self._root)), None)
        self.sensor = self._zone.name if self._zone else None
        self.trip = self._zone.trip if self._zone else None
        self.samples: list[MemorySample] = []
        self.climate: list[Climate] = []
        self.marks: list[Mark] = []
        self.rows = 0
        self._started = time.perf_counter()
        self._interval = _MEMORY_S
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end.set()
        self._thread.join()
        self.look()

    def mark(self, what: str) -> None:
        """From now on the run does `what`."""
        if not self.marks or self.marks[-1].what != what:
            self.marks.append(Mark(self.now(), what))
            self.look()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def look(self) -> MemorySample:
        """A sample of memory now."""
        use = memory_use()
        sample = MemorySample(self.now(), use.rss, use.anonymous, use.file, self.rows)
        self.samples.append(sample)
        return sample

    def feel(self) -> Climate:
        """What the device's sensors show now."""
        celsius = read_celsius(self._zone.path) if self._zone else None
        felt = Climate(self.now(), celsius, read_hertz(self._root), held_back(self._root))
        self.climate.append(felt)
        return felt

    def _run(self) -> None:
        next_feel = 0.0
        while True:
            self.look()
            if self.now() >= next_feel:
                self.feel()
                next_feel = self.now() + _CLIMATE_S
            if len(self.samples) > _MOST:
                del self.samples[1::2]
                self._interval *= 2
            if len(self.climate) > _MOST:
                del self.climate[1::2]
            if self._end.wait(self._interval):
                return
