"""KeyDiff: rows whose keys are least like the others.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference", arXiv:2504.15364. Keys
that point where most do are interchangeable; distinctive ones attract attention. No scores are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs, best_rows, check_options
from edge.types import FloatArray, IntArray


@dataclass(frozen=True)
class KeyDiff:
    sinks: int = 4
    recent: float = 0.25
    name: ClassVar[str] = "keydiff"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(keys=True)

    def __post_init__(self) -> None:
        check_options(self.sinks, self.recent)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        return best_rows(-view.by_keys(similarity), view, budget, self.sinks, int(self.recent * budget))


def similarity(keys: FloatArray) -> FloatArray:
    """Of each key's direction with the mean direction, [..., rows, head] to [..., rows]."""
    directions = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-6)
    return np.asarray((directions @ directions.mean(axis=-2)[..., None])[..., 0])
