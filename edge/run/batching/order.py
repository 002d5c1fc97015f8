"""The order of generations that wait for their turn: by class, then by age, and none waits forever."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol, TypeVar

INTERACTIVE, TOOLS, TITLES = range(3)
"""Classes of generations: of a person who waits, of programs, of background work."""

_FAIR = 4  # each so many turns, the one goes first that waits longest


class Waiting(Protocol):
    priority: int  # a class; the lowest number goes first
    arrived: int  # a moment of `Order.now`
    since: int  # when it last had a turn, or arrived


Some = TypeVar("Some", bound=Waiting)


class Order:
    """Chooses who is next. now: the number of a moment; later ones are larger."""

    def __init__(self) -> None:
        self.now = itertools.count().__next__  # of any thread

    def next(self, waiting: Sequence[Some], turns: int) -> Some:
        """The next of those that wait. turns: how many others had one before."""
        if turns % _FAIR == _FAIR - 1:
            return min(waiting, key=lambda each: each.since)
        return min(waiting, key=lambda each: (each.priority, each.arrived))
