"""Speed beside other programs, which want some of the cores: `edge.devices.load.neighbours` measures how many.

A team gives way (`edge.backends.tvm.cpu.kernels.team`): it has the cores that are free. Where there is none, a step has
one thread and a chunk all threads, each with its share of the time. Engines without such teams have all threads.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor
from typing import NamedTuple


class Crowd(NamedTuple):
    """Threads of other programs that want to run now, on average, and the cores that they share with this process."""

    neighbours: float
    cores: int


class Left(NamedTuple):
    """The shares that other programs leave: of a run's speed, and of the time of its threads' cores."""

    speed: float
    cores: float


def left_by(crowd: Crowd, threads: int, speed: Callable[[int], float], *, steps: bool, gives_way: bool) -> Left:
    """The shares left to steps, or to chunks. speed: of a number of threads that have cores of their own, in any unit.

    A fraction of a neighbour is one that wants a core for this share of the time.
    """

    def beside(neighbours: int) -> Left:
        team = threads
        if gives_way and (steps or neighbours < crowd.cores):
            team = max(1, min(threads, crowd.cores - neighbours))
        time = min(1.0, crowd.cores / (neighbours + team))
        return Left(time * speed(team) / speed(threads), time * team / threads)

    whole = floor(crowd.neighbours)
    pairs = zip(beside(whole), beside(whole + 1), strict=True)
    return Left(*(now + (crowd.neighbours - whole) * (more - now) for now, more in pairs))
