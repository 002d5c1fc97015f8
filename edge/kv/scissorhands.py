"""Scissorhands: rows that were important lately stay important.

Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
Time", arXiv:2305.17118. Within a window of recent queries, count how often each row got more attention than average;
those that seldom did are dropped, many at once, and the most recent rows always stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from edge.kv.policy import KVView, Needs, best_rows, check_options
from edge.types import IntArray


@dataclass(frozen=True)
class Scissorhands:
    """window: queries whose attention counts; recent: the share of the cache that is for recent rows."""

    sinks: int = 4
    window: int = 64
    recent: float = 0.25
    name: ClassVar[str] = "scissorhands"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_options(self.sinks, self.recent, window=self.window)

    @property
    def needs(self) -> Needs:
        return Needs(queries=self.window, votes=True)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        assert view.attention is not None
        return best_rows(view.attention, view, budget, self.sinks, int(self.recent * budget))
