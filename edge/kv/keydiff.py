"""KeyDiff: keep the rows whose keys differ most from the others.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference", arXiv:2504.15364. Keys
near the mean direction are interchangeable; distinctive ones attract attention. It needs no attention scores.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from edge.kv.policy import KVView, Needs, ScoredAndRecent
from edge.records import dataclass
from edge.types import FloatArray


@dataclass(frozen=True)
class KeyDiff(ScoredAndRecent):
    name: ClassVar[str] = "keydiff"
    needs: ClassVar[Needs] = Needs(keys=True)

    def score(self, view: KVView) -> FloatArray:
        return -view.by_keys(similarity)


def similarity(keys: FloatArray) -> FloatArray:
    """Cosine of each key with the mean direction, [..., rows, head] to [..., rows]."""
    directions = keys / np.maximum(np.linalg.norm(keys, axis=-1, keepdims=True), 1e-6)
    return np.asarray((directions @ directions.mean(axis=-2)[..., None])[..., 0])
