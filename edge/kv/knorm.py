"""K-norm: rows whose keys are short.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv:2406.11430. Keys of small
norm get high attention, so the longest go. No scores are needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs, best_rows, check_options
from edge.types import IntArray


@dataclass(frozen=True)
class KNorm:
    sinks: int = 4
    recent: float = 0.25
    name: ClassVar[str] = "knorm"
    evicts: ClassVar[bool] = True
    close_gaps: ClassVar[bool] = False
    needs: ClassVar[Needs] = Needs(keys=True)

    def __post_init__(self) -> None:
        check_options(self.sinks, self.recent)

    def rows_to_keep(self, view: KVView, budget: int) -> list[IntArray]:
        norms = view.by_keys(lambda keys: np.linalg.norm(keys, axis=-1))
        return best_rows(-norms, view, budget, self.sinks, int(self.recent * budget))
