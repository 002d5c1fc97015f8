"""Measured times of a device profile: their spread, and a long run in windows. Part of the schema of `profile.py`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from edge.devices.profiles.profile import SLOWER

_LEAST = 1e-12  # seconds: nothing takes less
TAKEN = 0.15  # share of the cores' time taken by other processes that explains a slowdown


@dataclass(frozen=True)
class Spread:
    """The 10th, 50th and 90th percentiles of `count` measurements."""

    p10: float
    p50: float
    p90: float
    count: int

    def __post_init__(self) -> None:
        if not _LEAST <= self.p10 <= self.p50 <= self.p90 <= 1 / _LEAST:
            raise ValueError("p10, p50 and p90 are out of order or out of range")

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of at least one value."""
        found = list(values)
        if len(found) == 1:
            return cls(found[0], found[0], found[0], 1)
        tenths = statistics.quantiles(found, n=10, method="inclusive")
        return cls(tenths[0], tenths[4], tenths[8], len(found))


@dataclass(frozen=True)
class Window:
    """A part of a long run."""

    start: float  # seconds since the run began
    seconds: float  # duration
    per_token: Spread  # seconds, without pauses
    joules_per_token: float | None
    celsius: float | None
    hertz: float | None
    others: float | None  # as in EngineProfile
    paused: float = 0.0  # of its seconds, to hold Settings.watts

    def __post_init__(self) -> None:
        if not 0 <= self.paused < self.seconds:
            raise ValueError("a window has pauses within its time")
        if not _LEAST <= self.seconds <= 1 / _LEAST or not 0 < self.per_token.count <= 1 / _LEAST:
            raise ValueError("a window has tokens and takes time")

    @property
    def tok_s(self) -> float:
        """Tokens / time, since a median would hide slow tokens and pauses."""
        return self.per_token.count / self.seconds

    @property
    def watts(self) -> float | None:
        """Average watts, pauses included."""
        return None if self.joules_per_token is None else self.joules_per_token * self.tok_s


@dataclass(frozen=True)
class Sustained:
    """A long answer, in windows of `length` seconds."""

    length: float
    windows: list[Window]

    def __post_init__(self) -> None:
        if not self.windows:
            raise ValueError("a long run has windows")

    @property
    def first(self) -> Window:
        return self.windows[0]

    @property
    def last(self) -> Window:
        return self.windows[-1]

    @property
    def ratio(self) -> float:
        """Speed of the last window / speed of the first."""
        return self.last.tok_s / self.first.tok_s

    @property
    def unpaused_ratio(self) -> float:
        """`ratio` without pauses, which are not due to heat."""
        first, last = (each.tok_s * each.seconds / (each.seconds - each.paused) for each in (self.first, self.last))
        return last / first

    @property
    def paused(self) -> bool:
        return any(each.paused for each in self.windows)

    @property
    def others(self) -> float:
        """The largest share of all cores' time that other processes took in a window."""
        return max(each.others or 0.0 for each in self.windows)

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.last.start + self.last.seconds

    @property
    def throttles(self) -> bool:
        """Whether the device slowed down, and CPU time of other processes does not explain it."""
        return self.unpaused_ratio < SLOWER and self.others < TAKEN

    @property
    def joules_ratio(self) -> float | None:
        """Joules per token in the last window / in the first."""
        first, last = self.first.joules_per_token, self.last.joules_per_token
        return last / first if first and last and first > 0 and last > 0 else None
