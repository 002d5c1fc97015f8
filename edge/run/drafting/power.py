"""The power of passes, where a sensor measures it: drafts have to pay by joules, too.

Sensors move in steps, about every millisecond at best. So seconds and joules are added up by the number of tokens in a
pass, and their ratio counts once the sensor moved in enough passes, and in most of them: a slow one says nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from edge.devices.power.base import Reading
from edge.records import dataclass
from edge.run.budgets.meters import EnergyMeter

ENOUGH = 8  # passes in which the sensor moved
_MEMORY = 64.0  # most passes that count: older ones lose their weight
_COST = 400  # readings may take 1/400 of the time, for each number of tokens


@dataclass
class _Sum:
    passes: float = 0.0
    moved: float = 0.0  # of these, passes in which the sensor moved
    seconds: float = 0.0
    joules: float = 0.0
    due: float = 0.0  # when a pass is measured again

    @property
    def watts(self) -> float:
        """0 if they are not known."""
        return self.joules / self.seconds if self.moved >= max(ENOUGH, self.passes / 2) else 0.0


class PassPower:
    """Sums of measured passes, by their number of tokens; 0: of drafting by a model."""

    def __init__(self, meter: EnergyMeter, clock: Callable[[], float] = time.perf_counter) -> None:
        self._meter, self._clock = meter, clock
        self._sums: dict[int, _Sum] = {}
        self._began: tuple[float, float, Reading] | None = None  # before the first reading, and after it

    def start(self, tokens: int) -> None:
        """Begin a pass over these tokens."""
        now, self._began = self._clock(), None
        if now >= self._sums.setdefault(tokens, _Sum()).due:
            reading = self._meter.read()
            self._began = now, self._clock(), reading

    def stop(self, tokens: int) -> None:
        """End the pass, of whose tokens this many were run."""
        if self._began is None:
            return
        ended, after = self._clock(), self._meter.read()
        (asked, began, before), self._began = self._began, None
        if after.kind == "estimate":  # the sensor failed, or other models' passes have run
            self._sums.clear()
            return
        each = self._sums.setdefault(tokens, _Sum())
        kept = min(1.0, _MEMORY / (each.passes + 1))
        each.passes, each.moved = kept * (each.passes + 1), kept * (each.moved + (after.samples > before.samples))
        each.seconds = kept * (each.seconds + ended - began)
        each.joules = kept * (each.joules + after.joules - before.joules)
        each.due = ended + _COST * (began - asked + self._clock() - ended)

    def ratio(self, tokens: int) -> float:
        """Watts of a pass over these tokens ÷ those of a pass over one; 1 until they are known. Of a number that is not
        known, those of the next lower one."""
        one = self._watts(1)
        found = next(filter(None, map(self._watts, range(tokens, 1, -1) if tokens else [0])), one)
        return found / one if one else 1.0

    @property
    def known(self) -> bool:
        """Whether drafts pay by joules, too."""
        return bool(self._watts(1)) and any(each.watts for tokens, each in self._sums.items() if tokens > 1)

    def _watts(self, tokens: int) -> float:
        return self._sums[tokens].watts if tokens in self._sums else 0.0
