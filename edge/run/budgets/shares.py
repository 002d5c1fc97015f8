"""The energy of generations that run at the same time: one meter counts, and each pays for its part of every pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from edge.devices.power.base import Reading
from edge.run.budgets.meters import EnergyMeter

_COST = 50  # the meter is read in 1/50 of the time at most, however many ask …
_LONGEST_S = 0.05  # … but at least so often


class Ledger:
    """Divides a meter's joules by the time in which each share ran; those of one pass have equal parts of it. Joules
    of a time in which none ran belong to the next that run; idle: those of longer times belong to none. It is an
    EnergyMeter of them all, for any thread."""

    def __init__(
        self, meter: EnergyMeter, clock: Callable[[], float] = time.perf_counter, *, idle: bool = False
    ) -> None:
        self._meter, self._clock, self._idle, self._lock = meter, clock, idle, threading.Lock()
        self._running: Sequence[Share] = ()
        self._since = self._read_at = self._ended = clock()
        self._cost = 0.0
        self._last = meter.read()
        self._seconds: dict[Share, float] = {}  # for which joules have not been divided

    def share(self, *, anew: bool = False) -> Share:
        """The meter of one generation, or of one of several models. anew: each of its readings is of now, which a
        budget needs that may be spent in milliseconds."""
        return Share(self, anew)

    def run(self, shares: Sequence[Share]) -> None:
        """These run from here on."""
        with self._lock:
            now = self._clock()
            if self._idle and shares and not (self._running or self._seconds) and now - self._ended > _LONGEST_S:
                self._last = self._meter.read()
            self._count()
            self._running, self._ended = shares, now

    def add_bytes(self, count: float) -> None:
        with self._lock:
            self._meter.add_bytes(count)

    def read(self, *, anew: bool = False) -> Reading:
        """The meter's reading, of now or shortly before, by which all shares are up to date."""
        with self._lock:
            return self._read(anew)

    def _read(self, anew: bool) -> Reading:
        now = self._clock()
        if not anew and now - self._read_at < min(_COST * self._cost, _LONGEST_S):
            return self._last
        self._count()
        reading = self._meter.read()
        self._read_at, self._cost = now, self._clock() - now
        if total := sum(self._seconds.values()):
            spent = reading.joules - self._last.joules
            for share, seconds in self._seconds.items():
                share.joules += spent * seconds / total
                share.divided = share.divided or len(self._seconds) > 1
            self._seconds.clear()
            self._last = reading
        elif self._idle and not self._running:
            self._last = reading
        return replace(reading, joules=self._last.joules)

    def _count(self) -> None:
        now = self._clock()
        for share in self._running:
            self._seconds[share] = self._seconds.get(share, 0.0) + (now - self._since) / len(self._running)
        self._since = now


def whole_of(meter: EnergyMeter) -> Ledger | None:
    """The ledger of which a meter has a share."""
    return meter.ledger if isinstance(meter, Share) else None


class Share:
    """The EnergyMeter of one generation, or of one of several models. Joules are an estimate once others, which ran in
    the same time, had a part of them."""

    def __init__(self, ledger: Ledger, anew: bool) -> None:
        self.ledger, self._anew, self.joules, self.divided = ledger, anew, 0.0, False

    def add_bytes(self, count: float) -> None:
        self.ledger.add_bytes(count)

    def read(self) -> Reading:
        reading = self.ledger.read(anew=self._anew)
        return replace(reading, joules=self.joules, kind="estimate" if self.divided else reading.kind)
