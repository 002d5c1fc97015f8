"""The Pareto front, up to differences that do not matter.

Figures in the same box of a logarithmic grid count as equal (ε-dominance), which keeps a front of several goals short
without losing a region of it (Laumanns, Thiele, Deb, Zitzler 2002, doi:10.1162/106365602760234108).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

STEP = 1.05  # ratio of a box's bounds: figures that differ by up to 5 % may count as equal


def box_of(costs: Sequence[float]) -> tuple[int, ...]:
    """The box of positive costs, as grid indices."""
    return tuple(math.floor(math.log(each) / math.log(STEP)) for each in costs)


def front(points: Sequence[T], costs: Callable[[T], Sequence[float]]) -> list[T]:
    """The points that no other dominates, in their order; of the points in a box, the one with the least costs.

    costs: positive numbers of a point, of which less is better, in order of importance.
    """
    best: dict[tuple[int, ...], tuple[Sequence[float], int]] = {}
    for index, point in enumerate(points):
        found = costs(point)
        box = box_of(found)
        if box not in best or tuple(found) < tuple(best[box][0]):
            best[box] = (found, index)
    kept = [index for box, (_, index) in best.items() if not any(_surpasses(other, box) for other in best)]
    return [points[index] for index in sorted(kept)]


def _surpasses(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Whether a box dominates another: it differs, and is nowhere worse."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))
