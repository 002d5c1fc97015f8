"""SnapKV: what the last queries look at, and its neighbours.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", arXiv:2404.14469. The last queries vote for
rows by their attention; votes are pooled over neighbouring rows, so that what stays stays readable; the observed window
itself is kept. The paper compresses once, at the end of the prompt; here it happens whenever the cache is full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs, best_rows, check_options
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class SnapKV:
    """window: queries that vote; kernel: rows over which votes are pooled (the largest counts), an odd number."""

    sinks: int = 4
    window: int = 32
    kernel: int = 7
    name: ClassVar[str] = "snapkv"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self.sinks, window=self.window, kernel=self.kernel)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        assert view.attention is not None
        return best_rows(pooled(view.attention, self.kernel), view, budget, self.sinks, self.window)


def pooled(votes: FloatArray, kernel: int) -> FloatArray:
    """The largest of each value and its neighbours, `kernel // 2` on either side."""
    most: FloatArray = votes.copy()
    for step in range(1, min(kernel // 2, votes.shape[-1] - 1) + 1):
        np.maximum(most[..., step:], votes[..., :-step], out=most[..., step:])
        np.maximum(most[..., :-step], votes[..., step:], out=most[..., :-step])
    return most
