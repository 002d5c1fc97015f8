"""H2O: heavy hitters and recent rows.

Zhang et al., "H₂O: Heavy-Hitter Oracle for Efficient Generative Inference", arXiv:2306.14048. A few rows receive most
of the attention, persistently. Half of the cache holds the most recent rows, half those with most attention from all
queries so far: here per query that could see the row, or old rows would win for being old.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.errors import InputError
from edge.kv.policy import EVERY, KVView, Needs, ScoredAndRecent
from edge.records import dataclass
from edge.types import FloatArray


@dataclass(frozen=True)
class H2O(ScoredAndRecent):
    """The H2O policy."""

    recent: float = 0.5
    aging: float = 1.0  # attention / age ** aging: 0 is the paper's sum, 1 the mean over queries that saw the row
    name: ClassVar[str] = "h2o"
    needs: ClassVar[Needs] = Needs(queries=EVERY)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.aging <= 1:
            raise InputError(f"aging is from 0 to 1, not {self.aging}")

    def score(self, view: KVView) -> FloatArray:
        return np.asarray(view.attention / np.maximum(view.ages, 1).astype(np.float32) ** np.float32(self.aging))
