"""The protocol of KV policies, which choose the rows that stay when the KV cache is full.

A policy knows nothing of engines. Given the rows and a budget, it names the rows to keep. The session asks it after
every chunk of prefill and during decode, so that `rows + incoming tokens ≤ capacity` always holds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import field, fields
from typing import ClassVar, Protocol

import numpy as np

from edge.errors import InputError
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, Granularity, IntArray

Selection = IntArray | Sequence[IntArray]
"""Rows that stay, strictly increasing, int32 [n]: the same for all heads, or one array per KV head of each layer."""


@dataclass(frozen=True)
class KVView:
    """The state that a policy sees: the rows in use, oldest first.

    Arrays are padded with 0 after a head's last row, and empty if the policy does not need them.
    """

    length: int  # rows in use of the head with most
    lengths: IntArray = field(default_factory=lambda: np.zeros((0, 0), np.int32))  # [layers, KV heads]: rows in use
    attention: FloatArray = field(default_factory=lambda: np.zeros((0, 0, 0), np.float32))  # [layers, KV heads, rows]
    ages: IntArray = field(default_factory=lambda: np.zeros((0, 0, 0), np.int32))  # likewise: tokens since arrival
    keys: Callable[[int], FloatArray] | None = None  # a layer's keys, [KV heads, rows, head]
    importance: Callable[[int], FloatArray] | None = None  # predicted for a layer's rows, [KV heads, rows], above 0
    longest: int = 0  # most rows that one head may keep, where heads may differ

    def by_keys(self, score: Callable[[FloatArray], FloatArray]) -> FloatArray:
        """Apply `score` to each layer's keys: float32 [layers, KV heads, rows]."""
        assert self.keys is not None
        return np.stack([score(self.keys(layer)) for layer in range(len(self.lengths))])


@dataclass(frozen=True)
class Needs:
    """A policy's requirements on the engine."""

    queries: int = 0  # number of last queries observed before an eviction; EVERY: all that ever ran
    votes: bool = False  # attention counts the queries that paid a row more than average, instead of summing
    keys: bool = False  # stored keys are read
    ranks: bool = False  # row importance is predicted, by a regression fitted to the model; requires `keys`
    uneven: Granularity = "token"  # finest unit with a row count of its own
    reads: int = 0  # most rows that a head reads for a token, chosen by the engine among those kept; 0: all

    @property
    def looks(self) -> bool:
        """Whether the policy needs more than row counts: the engine's cache must be a `HeadKVCache`."""
        return bool(self.queries) or self.keys


EVERY = -1
NOTHING = Needs()


class Policy(Protocol):
    """Chooses the rows that stay in the KV cache.

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
        """Choose at most `budget` rows of each head, or on average over heads where `needs.uneven` is finer than
        "token".

        Called only if `view.length > budget`.
        """
        ...


@dataclass(frozen=True)
class Scored(ABC):
    """A policy that keeps each head's sinks, its newest rows, and the remaining rows with the highest scores."""

    sinks: int = 4
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        names = {each.name for each in fields(self)} & {"sinks", "recent", "window", "kernel", "floor"}
        check_options(**{name: getattr(self, name) for name in names})

    @abstractmethod
    def score(self, view: KVView) -> FloatArray:
        """Scores, [layers, KV heads, rows]; the highest stay."""

    @abstractmethod
    def newest(self, budget: int) -> int:
        """The number of newest rows that stay in a head's budget."""

    def share_out(self, scores: FloatArray, view: KVView, budget: int) -> tuple[int | AnyArray, int | AnyArray]:
        """Rows to keep and newest rows among them: one number for all heads, or one per head, [layers · KV heads]."""
        return budget, self.newest(budget)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        scores = self.score(view)
        rows, newest = self.share_out(scores, view, budget)
        return best_rows(scores, view, rows, self.sinks, newest)


@dataclass(frozen=True)
class ScoredAndRecent(Scored):
    """A `Scored` policy that reserves a part of the cache for the newest rows. recent: that part, as a share of the
    budget."""

    recent: float = 0.25

    def newest(self, budget: int) -> int:
        return int(self.recent * budget)


def check_options(sinks: int, recent: float = 0.5, window: int = 1, kernel: int = 1, floor: float = 0.0) -> None:
    """Raise InputError for options that no policy can work with."""
    if sinks < 0:
        raise InputError(f"--sinks must be 0 or more, not {sinks}")
    if not 0 <= recent <= 1:
        raise InputError(f"recent is a share of the cache, from 0 to 1, not {recent}")
    if window < 1:
        raise InputError(f"window must be 1 or more, not {window}")
    if kernel < 1 or kernel % 2 == 0:
        raise InputError(f"kernel must be an odd number, not {kernel}")
    if not 0 <= floor <= 1:
        raise InputError(f"floor is a share, from 0 to 1, not {floor}")


def first_and_last(length: int, budget: int, sinks: int) -> IntArray:
    """The first `sinks` of `length` rows, and the last ones for the rest of the budget."""
    sinks = min(sinks, budget)
    recent = length - (budget - sinks)
    return np.concatenate([np.arange(sinks), np.arange(recent, length)]).astype(np.int32)


def best_rows(
    scores: AnyArray, view: KVView, budget: int | AnyArray, sinks: int, recent: int | AnyArray
) -> list[IntArray]:
    """Each head's first `sinks` rows, its last `recent`, and the remaining rows with the highest scores.

    scores: [layers, KV heads, rows]. budget, recent: for all heads, or one per head, [layers · KV heads]. If sinks and
    recent rows exceed the budget, the latter are cut.
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
    """The `count` first-ranked rows, the older on ties, in order of their arrival in the cache."""
    if count == 0:
        return np.zeros(0, np.int32)
    last = np.partition(ranked, count - 1)[count - 1]
    chosen = ranked < last
    equal = np.flatnonzero(~chosen & ~(ranked > last))  # NaN, too
    chosen[equal[: count - np.count_nonzero(chosen)]] = True
    return np.flatnonzero(chosen).astype(np.int32)
