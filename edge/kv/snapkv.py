"""SnapKV: keep rows that the last queries attend to, and their neighbours.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469. The last queries vote for
rows by their attention; votes are pooled over neighbouring rows, so that kept passages stay readable; the observed
window itself is kept. The paper compresses once, at the end of the prompt; here, whenever the cache is full.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs, Scored
from edge.records import dataclass
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class SnapKV(Scored):
    """The SnapKV policy."""

    window: int = 32  # queries that vote
    kernel: int = 7  # odd width of the max pooling of votes, in rows
    name: ClassVar[str] = "snapkv"

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def score(self, view: KVView) -> FloatArray:
        return pooled(view.attention, view.lengths, self.kernel)

    def newest(self, budget: int) -> int:
        return self.window


def pooled(votes: FloatArray, lengths: IntArray, kernel: int) -> FloatArray:
    """Max-pool votes over `kernel // 2` neighbours on either side.

    votes: [layers, KV heads, rows], not negative. lengths: [layers, KV heads]; votes stay 0 behind a head's last row.
    """
    most: FloatArray = votes.copy()
    for step in range(1, min(kernel // 2, votes.shape[-1] - 1) + 1):
        np.maximum(most[..., step:], votes[..., :-step], out=most[..., step:])
        np.maximum(most[..., :-step], votes[..., step:], out=most[..., :-step])
    most[np.arange(votes.shape[-1]) >= lengths[..., None]] = 0
    return most
