"""K-norm: keep the rows whose keys have the smallest norms.

Devoto et al., "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", arXiv:2406.11430. Keys of small
norm get high attention, so the largest are evicted. It needs no attention scores.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs, ScoredAndRecent
from edge.records import dataclass
from edge.types import FloatArray


@dataclass(frozen=True)
class KNorm(ScoredAndRecent):
    name: ClassVar[str] = "knorm"
    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: KVView) -> FloatArray:
        return -view.by_keys(lambda keys: np.linalg.norm(keys, axis=-1))
