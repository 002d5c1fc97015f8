"""The search by races: single fields in random order, then several at once; each candidate races the best so far.

A race is a few pairs of measurements, alternating best and candidate, and only their ratios count, since slow periods
of the machine affect both. A clearly worse candidate dies after three pairs. Nothing here knows what is measured, so
tests can plant an optimum and look for it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median

import numpy as np

from edge.backends.tuning import CHUNK, PARTS, STEP, Field, Values, defaults, relevant
from edge.devices.records import Comparison
from edge.errors import EngineError

PAIRS = 9  # of a race that goes to its end
COMPARED = 17  # pairs of the comparison with the defaults
_FLOOR = 4  # of COMPARED ratios, the median is above the fifth smallest with 97.5 % certainty, by counting signs
EARLY = 3  # pairs after which a candidate may die
WORSE, BETTER = 1.01, 0.99  # ratios of time nearer to 1 than these are not worth a change
JUMPS = 8  # candidates in a round that changes several fields at once
IDLE_ROUNDS = 3  # rounds without any gain that end the search

Measure = Callable[[Values, str], float]  # one measurement of a part of the score, in seconds


@dataclass(frozen=True)
class Trial:
    """The result of one race between a candidate and the best so far."""

    changes: dict[str, int | bool]  # the candidate's values that differ from the best; checked when read from a table
    against: dict[str, int | bool]  # the best's values of the same fields
    parts: tuple[str, ...]
    fate: str  # better, no better, died or failed
    pairs: int
    ratio: float | None  # median time / the best's, over the affected parts; None: failed
    part_ratios: dict[str, float]
    score: float | None  # predicted time of prompt and answer / that of the defaults
    seconds: float  # compiling and measuring


class OutOfTime(KeyboardInterrupt):
    """The time for tuning is over."""


@dataclass(frozen=True)
class Limits:
    """A tuning ends after `trials`, including those of earlier tunings, or when `clock` reaches `deadline`.

    alarm: raises OutOfTime in its context after some seconds, the only way to interrupt a compilation.
    """

    trials: int
    deadline: float
    clock: Callable[[], float]
    alarm: Callable[[float], AbstractContextManager[None]] = lambda seconds: nullcontext()

    def cut_off(self, reserve: float = 0.0) -> AbstractContextManager[None]:
        """A context that is interrupted when only `reserve` seconds are left."""
        return self.alarm(self.deadline - reserve - self.clock())


@dataclass(frozen=True)
class Found:
    """The best values found."""

    values: Values
    estimate: float  # time / that of the defaults, by the races won
    trials: tuple[Trial, ...]
    interrupted: bool
    late: bool = False  # time was too short for all trials


@dataclass
class _State:
    """The state of a search."""

    space: Sequence[Field]
    measure: Measure
    limits: Limits
    known: dict[str, Trial]
    on_trial: Callable[[Trial, bool], None]
    best: Values
    shares: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 1.0))
    standing: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 1.0))
    trials: list[Trial] = field(default_factory=list)
    reserve: float = 0.0  # seconds needed for the final comparison, from measured times
    longest: float = 0.0  # seconds of the longest trial so far

    @property
    def late(self) -> bool:
        """Whether another trial would miss the deadline."""
        return self.limits.clock() + self.longest + self.reserve >= self.limits.deadline

    def start(self) -> None:
        """Measure the time of each part, and how long measuring takes."""
        clock, began = self.limits.clock, self.limits.clock()
        for part in PARTS:
            first = self.measure(self.best, part)  # loads it, and compiles it perhaps
            loaded = clock()
            self.shares[part] = median([first, *(self.measure(self.best, part) for _ in range(EARLY - 1))])
            self.reserve += 2 * COMPARED * (clock() - loaded) / (EARLY - 1)
        self.longest = clock() - began

    def score(self, ratios: dict[str, float]) -> float:
        """Time / that of the defaults, if the best's parts change by these ratios."""
        total = sum(self.shares[part] * self.standing[part] * ratios.get(part, 1.0) for part in PARTS)
        return total / sum(self.shares.values())


def search(
    space: Sequence[Field], measure: Measure, limits: Limits, *, seed: int = 0, known: Sequence[Trial] = (),
    on_trial: Callable[[Trial, bool], None] = lambda trial, is_new: None,
) -> Found:  # fmt: skip
    """Search for values that take less time than the defaults. Deterministic except for measurements.

    known: trials of an earlier search of this space, which are not repeated. on_trial: called with every trial, and
    whether it is new. Ctrl-C ends the search and loses nothing. The deadline leaves time for the comparison that
    follows: no trial begins without enough time, and one that takes longer than earlier ones is cut off.
    """
    remembered = {_key(space, trial.against | trial.changes, trial.against, trial.parts): trial for trial in known}
    state = _State(space, measure, limits, remembered, on_trial, defaults(tuple(space)))
    interrupted = late = False
    try:
        with limits.cut_off():
            state.start()
        with limits.cut_off(state.reserve):
            late = _explore(state, random.Random(seed))
    except OutOfTime:
        late = True
    except KeyboardInterrupt:
        interrupted = True
    return Found(state.best, state.score({}), tuple(state.trials), interrupted, late)


def compare(
    measure: Measure, usual: Values, best: Values, on_pair: Callable[[int], None] = lambda pair: None
) -> Comparison:
    """Race the final values, alternating best, usual, usual, best …, and compare the time of the usual values / that of
    the best."""
    ratios = []
    for pair in range(COMPARED):
        on_pair(pair)
        first, second = (usual, best) if pair % 2 else (best, usual)
        times = [sum(measure(values, part) for part in PARTS) for values in (first, second)]
        ratios.append(times[0] / times[1] if pair % 2 else times[1] / times[0])
    ratios.sort()
    return Comparison(median(ratios), ratios[_FLOOR], quantile(ratios, 0.1), quantile(ratios, 0.9), COMPARED)


def is_significant(comparison: Comparison) -> bool:
    """True beyond noise; 1 false positive in 40."""
    return comparison.floor > 1


def race(measure: Measure, candidate: Values, best: Values, parts: Sequence[str]) -> tuple[str, list[dict[str, float]]]:
    """The candidate's fate, and for every pair its time / the best's: by part, and of all parts as ""."""
    pairs: list[dict[str, float]] = []
    for _ in range(PAIRS):
        usual, mine = {}, {}
        for part in parts:
            usual[part], mine[part] = measure(best, part), measure(candidate, part)
        ratios = {part: mine[part] / usual[part] for part in parts}
        pairs.append(ratios | {"": sum(mine.values()) / sum(usual.values())})
        totals = [each[""] for each in pairs]
        if len(pairs) >= EARLY and quantile(totals, 0.25) > WORSE:
            return "died", pairs
    return ("better" if median(totals) < BETTER and quantile(totals, 0.75) < 1 else "no better"), pairs


def quantile(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share))


def _explore(state: _State, rng: random.Random) -> bool:
    """Run rounds of single changes while they improve, and of jumps otherwise. Returns whether time ended them."""
    gained, idle = True, 0
    while idle < IDLE_ROUNDS:
        before = state.best
        for moves in list((_single_changes if gained else _jumps)(state.space, rng)):
            if not _try(state, moves):
                return len(state.trials) < state.limits.trials
        gained = state.best != before
        idle = 0 if gained else idle + 1
    return False


def _single_changes(space: Sequence[Field], rng: random.Random) -> Iterator[list[Values]]:
    """Every value of every field; one for decode and one for prefill share a compilation."""
    groups: dict[tuple[str, ...], list[Values]] = {(STEP,): [], (CHUNK,): [], PARTS: []}
    for each in space:
        groups[each.parts] += [{each.name: value} for value in each.choices]
    for group in groups.values():
        rng.shuffle(group)
    rounds = [[move for move in pair if move] for pair in zip_longest(groups[(STEP,)], groups[(CHUNK,)])]
    rounds += [[move] for move in groups[PARTS]]
    rng.shuffle(rounds)
    yield from rounds


def _jumps(space: Sequence[Field], rng: random.Random) -> Iterator[list[Values]]:
    """Changes of two or three fields at once, for optima that single changes cannot reach."""

    def jump(group: Sequence[Field]) -> Values:
        chosen = rng.sample(group, min(len(group), rng.choice((2, 3))))
        return {each.name: rng.choice(each.choices) for each in chosen}

    for _ in range(JUMPS):
        yield [jump([each for each in space if each.parts == (part,)]) for part in PARTS]
        yield [jump(space)]


def _try(state: _State, moves: Sequence[Values]) -> bool:
    """Race candidates that differ from the best in disjoint parts. False if the search is over."""
    changes = [{name: value for name, value in move.items() if state.best[name] != value} for move in moves]
    merged = state.best.copy()
    for each in changes:
        merged |= each
    for each in filter(None, changes):
        if len(state.trials) >= state.limits.trials:
            return False
        parts = _parts(state.space, each)
        trial = state.known.get(_key(state.space, merged, state.best, parts))
        is_new = trial is None
        if trial is None:
            if state.late:
                return False
            trial = _race(state, each, merged, parts)
            state.longest = max(state.longest, trial.seconds)
            state.known[_key(state.space, merged, state.best, parts)] = trial
        elif trial in state.trials:
            continue  # the same race as before in this search
        state.trials.append(trial)
        if trial.fate == "better":
            state.best = state.best | each
            for part, ratio in trial.part_ratios.items():
                state.standing[part] *= ratio
        state.on_trial(trial, is_new)
    return True


def _race(state: _State, changes: Values, merged: Values, parts: tuple[str, ...]) -> Trial:
    started, against = state.limits.clock(), state.best
    try:
        fate, pairs = race(state.measure, merged, against, parts)
    except EngineError:  # a candidate that does not compile
        return Trial(changes, against, parts, "failed", 0, None, {}, None, state.limits.clock() - started)
    ratios = {part: median(pair[part] for pair in pairs) for part in parts}
    ratio, seconds = median(pair[""] for pair in pairs), state.limits.clock() - started
    return Trial(changes, against, parts, fate, len(pairs), ratio, ratios, state.score(ratios), seconds)


def _parts(space: Sequence[Field], changes: Values) -> tuple[str, ...]:
    affected = {part for each in space if each.name in changes for part in each.parts}
    return tuple(part for part in PARTS if part in affected)


def _key(space: Sequence[Field], candidate: Values, best: Values, parts: tuple[str, ...]) -> str:
    """The key of a race: everything that its result depends on."""
    return str([sorted(relevant(tuple(space), each, parts).items()) for each in (candidate, best)])
