"""Scissorhands: rows that were important recently stay important.

Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
Time", arXiv:2305.17118. Within a window of recent queries, count how often each row got more attention than average.
The rows with the lowest counts are evicted, many at once; the most recent rows always stay.
"""

from __future__ import annotations

from typing import ClassVar

from edge.kv.policy import KVView, Needs, ScoredAndRecent
from edge.records import dataclass
from edge.types import FloatArray


@dataclass(frozen=True)
class Scissorhands(ScoredAndRecent):
    """The Scissorhands policy."""

    window: int = 64  # recent queries whose attention counts
    name: ClassVar[str] = "scissorhands"

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window, votes=True)

    def score(self, view: KVView) -> FloatArray:
        return view.attention
