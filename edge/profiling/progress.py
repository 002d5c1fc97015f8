"""How far a measurement is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

OnStep = Callable[[str, float], None]  # what is done, and the part of it that is


def part_of(on_step: OnStep, seconds: Sequence[float], number: int) -> OnStep:
    """Progress of one part as progress of all. seconds: that each of them takes, about."""
    before, total = sum(seconds[:number]), sum(seconds)
    return lambda what, share: on_step(what, (before + seconds[number] * min(1.0, share)) / total)
