"""The effect of every value that a tuning tried, from its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from edge.tuning.search import Trial


@dataclass(frozen=True)
class Effect:
    """A value of a field. ratio: time with it / time with the field's default, of the parts that it affects."""

    field: str
    value: int
    ratio: float
    races: int
    parts: tuple[str, ...]


def effects(trials: Sequence[Trial], usual: dict[str, int]) -> list[Effect]:
    """From the trials that changed one field only, in the order of the fields; medians where a value raced repeatedly.

    usual: the defaults. The ratio of a value that raced against another than the default is multiplied by that other
    value's own ratio.
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
    """The number of trials by their fate, the most frequent first."""
    return dict(Counter(trial.fate for trial in trials).most_common())
