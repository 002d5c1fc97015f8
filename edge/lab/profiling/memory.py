"""Memory, temperature and clock while an engine runs, and memory samples split by purpose."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

from edge.devices.memory import memory_use
from edge.devices.memory.mappings import Mapped
from edge.devices.power import sensors_root
from edge.devices.thermal import held_back, read_celsius, read_hertz, zones
from edge.lab.profiling.profile import Climate, Mark, MemoryBase, MemorySample
from edge.plan.plan import Plan

_MEMORY_S = 0.05  # between two samples, which take 40 µs each
_CLIMATE_S = 1.0  # some of these files make the kernel read slow sensors
_MOST = 600  # samples kept: beyond, every second one is dropped, and the interval doubles
_WEIGHTS_AT_LEAST = 1 << 16  # bytes: smaller mapped files are not weights


class Sampler:
    """A thread that samples while it is entered. Times are seconds since its construction. `rows`: KV rows in use, set
    by the code that fills the cache."""

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or sensors_root()
        self._zone = next(iter(zones(self._root)), None)
        self.sensor = self._zone.name if self._zone else None
        self.trip = self._zone.trip if self._zone else None
        self.samples: list[MemorySample] = []
        self.climate: list[Climate] = []
        self.marks: list[Mark] = []
        self.peak_anonymous: int | None = None  # bytes, like `peak_swap`
        self.peak_swap: int | None = None
        self.rows = 0
        self._started = time.perf_counter()
        self._interval = _MEMORY_S
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def __enter__(self) -> Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self.sample_memory()

    def mark(self, what: str) -> None:
        """Record that the run does `what` from now on."""
        if not self.marks or self.marks[-1].what != what:
            self.marks.append(Mark(self.now(), what))
            self.sample_memory()

    def now(self) -> float:
        return time.perf_counter() - self._started

    def sample_memory(self) -> MemorySample:
        use = memory_use()
        self.samples.append(MemorySample(self.now(), use.rss, use.anonymous, use.file, self.rows, use.swap))
        if use.anonymous is not None:
            self.peak_anonymous = max(use.anonymous, self.peak_anonymous or 0)
        if use.swap is not None:
            self.peak_swap = max(use.swap, self.peak_swap or 0)
        return self.samples[-1]

    def sample_climate(self) -> None:
        celsius = read_celsius(self._zone.path) if self._zone else None
        self.climate.append(Climate(self.now(), celsius, read_hertz(self._root), held_back(self._root)))

    def _run(self) -> None:
        next_climate = 0.0
        while True:
            self.sample_memory()
            if self.now() >= next_climate:
                self.sample_climate()
                next_climate = self.now() + _CLIMATE_S
            if len(self.samples) > _MOST:
                del self.samples[1::2]
                self._interval *= 2
            if len(self.climate) > _MOST:
                del self.climate[1::2]
            if self._end.wait(self._interval):
                return


@dataclass(frozen=True)
class MemorySplit:
    """Bytes of a sample by purpose."""

    interpreter: int  # with all libraries
    weights: int
    kv: int
    scratch: int


def memory_base(
    plan: Plan, before: MemorySample, warm: MemorySample, files_before: dict[str, Mapped], files: dict[str, Mapped]
) -> MemoryBase | None:
    """The basis for splitting a run's samples; None where the system does not distinguish kinds of pages. before: a
    sample before loading. warm: after the first passes. files: those mapped at the end.

    Weights are the files mapped since `files_before` that contain no code. If less than half of the weights' bytes is
    mapped, they were copied. The cache takes its memory all at once, or as its rows are used: the assumption closer to
    the measured growth of private memory by loading and the first passes counts, with half of the planned scratch,
    which they may not have touched entirely. (An engine may clear its whole cache; with huge pages, a few rows touch
    all of it, too.)
    """
    if before.anonymous is None or warm.anonymous is None or warm.file is None or not files:
        return None
    weights = [
        each for path, each in files.items()
        if path not in files_before and not each.code and each.size >= _WEIGHTS_AT_LEAST
    ]  # fmt: skip
    mapped = 2 * sum(each.size for each in weights) > plan.bytes.weights
    resident = sum(each.resident for each in files.values())
    growth = warm.anonymous - before.anonymous - (0 if mapped else plan.bytes.weights)
    fixed = plan.bytes.fixed_kv
    used = fixed + (plan.bytes.kv - fixed) * min(1.0, warm.rows / plan.config.capacity)
    return MemoryBase(
        anonymous=before.anonymous,
        libraries=resident - sum(each.resident for each in weights),
        mapped=mapped,
        kv_at_once=growth >= (used + plan.bytes.kv + plan.bytes.scratch) / 2,
        weights=plan.bytes.weights,
        kv=plan.bytes.kv,
        capacity=plan.config.capacity,
    )


def split(sample: MemorySample, base: MemoryBase) -> MemorySplit:
    """Split `sample.rss` by purpose. The total and mapped weights are measured. The cache counts its used rows (or all
    rows, if taken at once), copied weights are as planned, and scratch is the rest."""
    file, anonymous = sample.file or 0, sample.anonymous or 0
    libraries = min(file, base.libraries)
    weights = file - libraries
    interpreter = min(anonymous, base.anonymous)
    left = anonymous - interpreter
    if not base.mapped:
        copied = min(left, base.weights)
        libraries, weights, left = file, copied, left - copied
    rows = base.capacity if base.kv_at_once else min(sample.rows, base.capacity)
    kv = min(left, base.kv * rows // base.capacity)
    shared = max(0, sample.rss - file - anonymous)  # memory that is neither, such as shared memory
    return MemorySplit(interpreter + libraries, weights, kv, left - kv + shared)
