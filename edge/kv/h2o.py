"""H2O: heavy hitters and recent rows.

Zhang et al., "H₂O: Heavy-Hitter Oracle for Efficient Generative Inference", arXiv:2306.14048. A few rows get most of
the attention, and go on to. Half of the cache is for the most recent rows, half for those with most attention from all
queries so far: here per query that could see the row, or old rows would win for being old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.kv.policy import EVERY, KVView, Needs, best_rows, check_options
from edge.types import IntArray


@dataclass(frozen=True)
class H2O:
    """recent: the share of the cache that is for recent rows."""

    sinks: int = 4
    recent: float = 0.5
    name: ClassVar[str] = "h2o"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(queries=EVERY)

    def __post_init__(self) -> None:
        check_options(self.sinks, self.recent)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        assert view.attention is not None
        assert view.ages is not None
        scores = view.attention / np.maximum(view.ages, 1).astype(np.float32)
        return best_rows(scores, view, budget, self.sinks, int(self.recent * budget))
