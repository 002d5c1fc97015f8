"""What engines share that time their operators, and what reports make of the times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from edge.backends.base import PHASES, Operator


def by_name(operators: Iterable[Operator]) -> list[Operator]:
    """One operator for each name, all layers together, in the order in which they first run."""
    return _added(operators, lambda each: each.name)


def by_phase(operators: Iterable[Operator]) -> list[Operator]:
    """One operator for each phase that occurs, named as it, in the order of `PHASES`: comparable between engines."""
    found = {each.phase: replace(each, name=each.phase) for each in _added(operators, lambda each: each.phase)}
    return [found[phase] for phase in PHASES if phase in found]


def _added(operators: Iterable[Operator], key: Callable[[Operator], str]) -> list[Operator]:
    sums: dict[str, Operator] = {}
    for each in operators:
        each = replace(each, layer=None)
        name = key(each)
        sums[name] = _sum(sums[name], each) if name in sums else each
    return list(sums.values())


def _sum(one: Operator, other: Operator) -> Operator:
    """Bytes and flops that are unknown in one of two do not hide the other's; waiting weighs by time."""
    seconds = one.seconds + other.seconds
    waited = None
    if one.waited is not None and other.waited is not None:
        waited = (one.waited * one.seconds + other.waited * other.seconds) / seconds if seconds else 0.0
    return replace(
        one, calls=one.calls + other.calls, seconds=seconds, waited=waited,
        bytes=_total(one.bytes, other.bytes), flops=_total(one.flops, other.flops),
    )  # fmt: skip


def _total(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else one + other
