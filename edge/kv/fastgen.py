"""FastGen: give every head the cheapest cache that still recovers its attention.

Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs", arXiv:2310.01801. Some heads
attend to near rows, some to a few heavy rows, some to all. Each is profiled by its own attention and gets the cheaper
of two: recent rows only, or heavy rows and a few recent ones; both keep sinks. The paper fixes the share of attention
to recover and takes the memory that this needs; here memory is fixed, and the share is the largest that fits. Its rule
for punctuation needs the text and is left out.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.policy import EVERY, KVView, Needs, ScoredAndRecent
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

_HALVINGS = 12  # bisection steps in the search for the share


@dataclass(frozen=True)
class FastGen(ScoredAndRecent):
    """The FastGen policy. recent: rows that always stay, as a share of the mean number of rows."""

    name: ClassVar[str] = "fastgen"
    needs: ClassVar[Needs] = Needs(queries=EVERY, uneven="head")

    def score(self, view: KVView) -> FloatArray:
        return np.divide(view.attention, np.maximum(view.ages, 1), dtype=np.float32)

    def share_out(self, scores: FloatArray, view: KVView, budget: int) -> tuple[AnyArray, AnyArray]:
        heads, lengths = scores.reshape(-1, scores.shape[-1]), view.lengths.reshape(-1)
        least = min(self.sinks + self.newest(budget), budget)
        local = recovered(newest_first(heads, lengths, self.sinks))
        heavy = recovered(heaviest_first(heads, lengths, self.sinks, least - self.sinks))
        most = np.minimum(lengths, view.longest)
        share = largest_share(local, heavy, least, most, budget * len(heads))
        near, far = rows_for(local, share), rows_for(heavy, share)
        rows = np.clip(np.minimum(near, far), least, most)
        # The newest rows serve a head that attends to near rows best: its heavy rows mattered to past queries.
        return rows, np.where(near <= far, rows, least - self.sinks)


def newest_first(scores: FloatArray, lengths: IntArray, sinks: int) -> FloatArray:
    """Sort scores [heads, rows] by the recency rule: sinks, then from the newest back."""
    rows = np.arange(scores.shape[-1])
    back = lengths[:, None] - 1 - (rows - sinks)
    order = np.where(rows < sinks, rows, np.where(back >= sinks, back, rows))
    return np.take_along_axis(scores, np.minimum(order, scores.shape[-1] - 1), axis=-1)


def heaviest_first(scores: FloatArray, lengths: IntArray, sinks: int, recent: int) -> FloatArray:
    """Sort scores [heads, rows] by the attention rule: rows that always stay, then the heaviest."""
    rows = np.arange(scores.shape[-1])
    always = (rows < sinks) | ((rows >= lengths[:, None] - recent) & (rows < lengths[:, None]))
    order = np.argsort(-np.where(always, np.float32(np.inf), scores), axis=-1)
    return np.take_along_axis(scores, order, axis=-1)


def recovered(ordered: FloatArray) -> AnyArray:
    """The share of a head's attention in its first 1, 2, … rows, [heads, rows]."""
    sums = np.cumsum(ordered, axis=-1, dtype=np.float64)
    return np.asarray(sums / np.maximum(sums[:, -1:], 1e-30))


def rows_for(shares: AnyArray, share: float) -> AnyArray:
    """The number of rows that recover `share`, [heads]."""
    return np.asarray((shares < share).sum(axis=-1) + 1)


def largest_share(local: AnyArray, heavy: AnyArray, least: int, most: AnyArray, total: int) -> float:
    """The largest share that all heads can recover with `total` rows, each head between `least` and its `most`."""
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        rows = np.clip(np.minimum(rows_for(local, middle), rows_for(heavy, middle)), least, most)
        low, high = (middle, high) if rows.sum() <= total else (low, middle)
    return low
