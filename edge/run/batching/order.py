"""The order of waiting generations: by class, then by age, without starvation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

_FAIR = 4  # every fourth turn, the generation that waits longest goes first


class Waiting(Protocol):
    priority: int  # a class; the lowest number goes first
    arrived: int  # a moment of `Order.now`
    since: int  # when it last had a turn, or arrived


Some = TypeVar("Some", bound=Waiting)


class Order:
    """Chooses the next generation. now: returns a logical time stamp, larger at each call."""

    def __init__(self) -> None:
        self.now = itertools.count().__next__  # of any thread

    def next(self, waiting: Sequence[Some], turns: int) -> Some:
        """The next of the waiting generations. turns: the number of turns before."""
        if turns % _FAIR == _FAIR - 1:
            return min(waiting, key=lambda each: each.since)
        return min(waiting, key=lambda each: (each.priority, each.arrived))
