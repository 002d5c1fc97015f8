"""The energy of concurrent generations: one meter counts, and each generation pays for its part of every pass."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from edge.devices.power.base import Reading
from edge.run.budgets.meters import EnergyMeter

_COST = 50  # reading the meter takes at most 1/50 of the time, however many callers ask …
_LONGEST_S = 0.05  # … but readings are never older than this


class EnergyLedger:
    """Divides a meter's joules among shares by the time in which each ran; the shares of one pass have equal parts.
    Joules of a time in which none ran go to the shares that run next; idle: not those of longer idle times, which go to
    none. The ledger is the EnergyMeter of all shares; any thread may use it."""

    def __init__(
        self, meter: EnergyMeter, clock: Callable[[], float] = time.perf_counter, *, idle: bool = False
    ) -> None:
        self._meter, self._clock, self._idle, self._lock = meter, clock, idle, threading.Lock()
        self._running: Sequence[Share] = ()
        self._since = self._read_at = self._ended = clock()
        self._cost = 0.0
        self._last = meter.read()
        self._seconds: dict[Share, float] = {}  # whose joules have not been divided yet

    def share(self, *, anew: bool = False) -> Share:
        """The meter of one generation, or of one of several models. anew: whether each reading is new, as needed by a
        budget that may be spent in milliseconds."""
        return Share(self, anew)

    def run(self, shares: Sequence[Share]) -> None:
        """Charge these shares from now on."""
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
        """The meter's reading, at most `_LONGEST_S` old, with all shares up to date. anew: read the meter now."""
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


def whole_of(meter: EnergyMeter) -> EnergyLedger | None:
    """The ledger of a share; None for other meters."""
    return meter.ledger if isinstance(meter, Share) else None


class Share:
    """The EnergyMeter of one generation, or of one of several models. Its joules are an estimate once they have been
    divided with other shares."""

    def __init__(self, ledger: EnergyLedger, anew: bool) -> None:
        self.ledger, self._anew, self.joules, self.divided = ledger, anew, 0.0, False

    def add_bytes(self, count: float) -> None:
        self.ledger.add_bytes(count)

    def read(self) -> Reading:
        reading = self.ledger.read(anew=self._anew)
        return replace(reading, joules=self.joules, kind="estimate" if self.divided else reading.kind)
