"""Ada-KV: SnapKV with a layer's rows distributed over its heads by attention.

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference",
arXiv:2407.11550. Some heads attend to few rows, others to many. The best rows among all heads of a layer stay; a floor
for every head keeps concentrated ones from losing all.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs
from edge.kv.snapkv import SnapKV
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray


@dataclass(frozen=True)
class AdaKV(SnapKV):
    """The Ada-KV policy."""

    floor: float = 0.2  # guaranteed rows of every head, as a share of the mean
    name: ClassVar[str] = "adakv"

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window, uneven="head")

    def share_out(self, scores: FloatArray, view: KVView, budget: int) -> tuple[AnyArray, int]:
        floor = max(int(self.floor * budget), min(self.sinks, budget))
        most = np.minimum(view.lengths, view.longest) - floor
        shares = [allocate(layer, limits, budget - floor) for layer, limits in zip(scores, most, strict=True)]
        return floor + np.concatenate(shares), self.window


def allocate(scores: FloatArray, most: IntArray, mean: int) -> IntArray:
    """The number of rows of each head among the best `mean` · heads rows of a layer. scores: [heads, rows].

    most: limits per head, [heads]; only a head's `most` best rows compete. Returns int32 [heads].
    """
    ordered = -np.sort(-scores, axis=-1)
    ordered[np.arange(scores.shape[-1]) >= most[:, None]] = -1
    best = np.argsort(-ordered, axis=None, kind="stable")[: mean * len(scores)]
    best = best[ordered.reshape(-1)[best] >= 0]
    return np.bincount(best // scores.shape[-1], minlength=len(scores)).astype(np.int32)
