"""KVzap: keep the rows that the model would read to repeat the text, whichever heads they belong to.

Jegou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning", arXiv:2601.07891. A linear model, fitted once
for each KV head, predicts a row's importance. Importance is comparable across heads, so heads that attend far back keep
more rows. The paper predicts from the input of attention and evicts rows below a threshold; here the prediction reads
the KV row itself (backends/importance.py), and the budget decides.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.adakv import allocate
from edge.kv.policy import KVView, Needs, ScoredAndRecent
from edge.kv.snapkv import pooled
from edge.records import dataclass
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class KVzap(ScoredAndRecent):
    """The KVzap policy."""

    recent: float = 0.2
    floor: float = 0.2  # guaranteed rows of every head, as a share of the mean
    kernel: int = 5  # odd width of the max pooling of importance, in rows
    name: ClassVar[str] = "kvzap"

    @property
    def needs(self) -> Needs:
        return Needs(keys=True, ranks=True, uneven="head" if self.floor < 1 else "token")

    def score(self, view: KVView) -> FloatArray:
        assert view.importance is not None
        importance = np.stack([view.importance(layer) for layer in range(len(view.lengths))])
        return pooled(importance, view.lengths, self.kernel)

    def share_out(self, scores: FloatArray, view: KVView, budget: int) -> tuple[AnyArray, int]:
        floor = max(int(self.floor * budget), min(self.sinks, budget))
        most = (np.minimum(view.lengths, view.longest) - floor).reshape(-1)
        shares = allocate(scores.reshape(-1, scores.shape[-1]), most, budget - floor)
        return floor + shares, self.newest(budget)
