"""H2O: heavy hitters and recent rows.

Zhang et al., "H₂O: Heavy-Hitter Oracle for Efficient Generative Inference", arXiv:2306.14048. A few rows get most of
the attention, and go on to. Half of the cache is for the most recent rows, half for those with most attention from all
queries so far: here per query that could see the row, or old rows would win for being old.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.errors import InputError
from edge.kv.policy import EVERY, KVView, Needs, best_rows, check_options
from edge.types import IntArray


@dataclass(frozen=True)
class H2O:
    """recent: the share of the cache that is for recent rows. aging: attention counts per age to this power: 0 is the
    paper's sum, 1 the mean over all queries that could see the row."""

    sinks: int = 4
    recent: float = 0.5
    aging: float = 1.0
    name: ClassVar[str] = "h2o"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(queries=EVERY)

    def __post_init__(self) -> None:
        check_options(self.sinks, self.recent)
        if not 0 <= self.aging <= 1:
            raise InputError(f"aging is from 0 to 1, not {self.aging}")

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        assert view.attention is not None
        assert view.ages is not None
        scores = view.attention / np.maximum(view.ages, 1).astype(np.float32) ** np.float32(self.aging)
        return best_rows(scores, view, budget, self.sinks, int(self.recent * budget))
