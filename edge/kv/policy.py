"""Which rows of the KV cache stay when it is full: the protocol that every policy follows.

A policy knows nothing of engines. It is told what rows there are and how many may stay, and names those that do. The
session asks it after every chunk of prefill and during decode, so that `rows + incoming tokens ≤ capacity` holds at
every moment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Protocol

import numpy as np

from edge.errors import InputError
from edge.types import AnyArray, FloatArray, Granularity, IntArray

Selection = IntArray | Sequence[IntArray]
"""Rows that stay, strictly increasing, int32 [n]: the same for all heads, or one array per KV head of each layer."""


@dataclass(frozen=True)
class KVView:
    """What a policy may look at: the rows in use, oldest first.

    lengths: rows in use of each head. attention: what the observed queries paid to each row, float32 [layers, KV heads,
    rows], mean over the query heads of a group. ages: tokens since each row came, in the same shape. keys: a function
    that gives a layer's keys as they are stored, float32 [KV heads, rows, head], because those of all layers together
    would be larger than the cache. All are 0 behind a head's last row, and empty if the policy does not need them.
    longest: rows that one head may keep, where heads may differ.
    """

    length: int  # of the head that has most
    lengths: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # [layers, KV heads]
    attention: FloatArray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))
    ages: IntArray = field(default_factory=lambda: np.zeros((0, 0, 0), np.int32))
    keys: Callable[[int], FloatArray] | None = None
    longest: int = 0

    def by_keys(self, score: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """`score` of each layer's keys: float32 [layers, KV heads, rows]."""
        assert self.keys is not None
        return np.stack([score(self.keys(layer)) for layer in range(len(self.lengths))])


@dataclass(frozen=True)
class Needs:
    """queries: how many of the last ones are observed before an eviction, EVERY for all that ever ran; keys: read.

    votes: attention is the number of these queries that paid a row more than average, instead of the sum. uneven: the
    finest unit that gets a number of rows of its own.
    """

    queries: int = 0
    votes: bool = False
    keys: bool = False
    uneven: Granularity = "token"

    @property
    def looks(self) -> bool:
        """More than the number of rows matters: the engine must be a `HeadKVCache`."""
        return bool(self.queries) or self.keys


EVERY = -1
NOTHING = Needs()


class Policy(Protocol):
    """name: as in --kv-policy. evicts: whether it ever evicts a row. close_gaps: see `KVCache.keep`.

    A policy that evicts has an option `sinks`: the first rows, which it never evicts from any head as long as the
    budget is no smaller.
    """

    @property
    def name(self) -> str: ...

    @property
    def evicts(self) -> bool: ...

    @property
    def close_gaps(self) -> bool: ...

    @property
    def needs(self) -> Needs: ...

    def rows_to_keep(self, view: KVView, budget: int) -> Selection:
        """At most `budget` rows of each head, or on average over all heads where `needs.uneven` is finer than "token".

        Called only if `view.length > budget`.
        """
        ...


@dataclass(frozen=True)
class Scored(ABC):
    """A policy that keeps, for each head, its sinks, its newest rows, and of the rest those with the highest scores."""

    sinks: int = 4
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        names = {each.name for each in fields(self)} & {"sinks", "recent", "window", "kernel"}
        check_options(**{name: getattr(self, name) for name in names})

    @abstractmethod
    def score(self, view: KVView) -> FloatArray:
        """[layers, KV heads, rows]."""

    @abstractmethod
    def newest(self, budget: int) -> int:
        """Of the rows that a head may keep, those that stay because they are the newest."""

    def share_out(self, scores: FloatArray, view: KVView, budget: int) -> tuple[int | AnyArray, int | AnyArray]:
        """Rows to keep, and how many of them because they are the newest: for every head alike, or one number each,
        [layers · KV heads]."""
        return budget, self.newest(budget)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        scores = self.score(view)
        rows, newest = self.share_out(scores, view, budget)
        return best_rows(scores, view, rows, self.sinks, newest)


@dataclass(frozen=True)
class ScoredAndRecent(Scored):
    """recent: the share of the cache that is for the newest rows."""

    recent: float = 0.25

    def newest(self, budget: int) -> int:
        return int(self.recent * budget)


def check_options(sinks: int, recent: float = 0.5, window: int = 1, kernel: int = 1) -> None:
    """Raises InputError for options that no policy can work with."""
    if sinks < 0:
        raise InputError(f"--sinks must be 0 or more, not {sinks}")
    if not 0 <= recent <= 1:
        raise InputError(f"recent is a share of the cache, from 0 to 1, not {recent}")
    if window < 1:
        raise InputError(f"window must be 1 or more, not {window}")
    if kernel < 1 or kernel % 2 == 0:
        raise InputError(f"kernel must be an odd number, not {kernel}")


def first_and_last(length: int, budget: int, sinks: int) -> IntArray:
    """Of `length` rows, the first `sinks` and as many of the last as the budget leaves room for."""
    sinks = min(sinks, budget)
    recent = length - (budget - sinks)
    return np.concatenate([np.arange(sinks), np.arange(recent, length)]).astype(np.int32)


def best_rows(
    scores: AnyArray, view: KVView, budget: int | AnyArray, sinks: int, recent: int | AnyArray
) -> list[IntArray]:
    """For each head the first `sinks` rows, the last `recent`, and of the rest those with the highest scores.

    scores: [layers, KV heads, rows]. budget, recent: for all heads, or one for each, [layers · KV heads]. If sinks and
    recent rows exceed the budget, the latter give way.
    """
    heads = scores.reshape(-1, scores.shape[-1])
    lengths = view.lengths.reshape(-1)
    budgets = np.minimum(np.broadcast_to(budget, len(heads)), lengths)
    rows, ends = np.arange(heads.shape[-1]), lengths[:, None]
    first = np.minimum(sinks, budgets)[:, None]
    last = np.minimum(np.broadcast_to(recent, len(heads)), budgets - first[:, 0])[:, None]
    protected = (rows < first) | ((rows >= ends - last) & (rows < ends))
    most = np.float32(np.inf)
    ranked = np.where(protected, -most, np.where(rows < ends, -heads, most))  # the best first
    return [best(each, count) for each, count in zip(ranked, budgets.tolist(), strict=True)]


def best(ranked: AnyArray, count: int) -> IntArray:
    """The `count` rows that come first, of equal ones the older, in the order in which they came to the cache."""
    if count == 0:
        return np.zeros(0, np.int32)
    last = np.partition(ranked, count - 1)[count - 1]
    chosen = ranked < last
    equal = np.flatnonzero(~chosen & ~(ranked > last))  # NaN, too
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen).astype(np.int32)
