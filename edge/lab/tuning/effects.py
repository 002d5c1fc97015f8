"""The effect of each value that a tuning tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from edge.lab.tuning.races import Trial


@dataclass(frozen=True)
class Effect:
    """The effect of one value of a field."""

    field: str
    value: int
    ratio: float  # time / time with the field's default, over the affected parts
    races: int
    parts: tuple[str, ...]


def effects(trials: Sequence[Trial], usual: dict[str, int]) -> list[Effect]:
    """Effects from the trials that changed a single field, in field order; medians where a value raced repeatedly.

    usual: the defaults. If a value raced against another value than the default, its ratio is multiplied by the ratio
    of the other value.
    """
    ratios: dict[tuple[str, int], list[float]] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for trial in trials:
        if len(trial.changes) != 1 or trial.ratio is None:
            continue
        ((name, value),) = trial.changes.items()
        before = trial.against[name]
        base = 1.0 if before == usual[name] else median(ratios.get((name, before), [1.0]))
        ratios.setdefault((name, value), []).append(trial.ratio * base)
        parts[name] = trial.parts
    order = list(usual)
    found = [Effect(name, value, median(each), len(each), parts[name]) for (name, value), each in ratios.items()]
    return sorted(found, key=lambda effect: (order.index(effect.field), effect.value))


def fates(trials: Sequence[Trial]) -> dict[str, int]:
    """The number of trials by fate, most frequent first."""
    return dict(Counter(trial.fate for trial in trials).most_common())
