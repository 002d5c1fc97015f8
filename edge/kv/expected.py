"""Expected Attention: keep the rows that coming queries will attend to, whatever they ask.

Devoto et al., "Expected Attention: KV Cache Compression by Estimating Attention from Future Queries Distribution",
arXiv:2510.00636. Queries of a head are nearly Gaussian, q ~ N(μ, Σ), so the expected weight of a key is
E[exp(qᵀk)] = exp(μᵀk + kᵀΣk / 2), with RoPE averaged over the next positions; a row counts as its share of a head's
weight times the norm of its value. The paper takes μ and Σ from the prompt; here they are the model's own, from a text
that is measured once, and one Gaussian stands for all query heads of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from edge.kv.policy import Gaussian, KVView, Needs, ScoredAndRecent
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class ExpectedAttention(ScoredAndRecent):
    """The Expected Attention policy."""

    recent: float = 0.1
    floor: float = 0.02  # share of weight that every row has at least: rows with large values stay
    name: ClassVar[str] = "expected"
    needs: ClassVar[Needs] = Needs(keys=True, expects=True)

    def score(self, view: KVView) -> FloatArray:
        assert view.keys is not None
        assert view.queries is not None
        assert view.value_norms is not None
        used = np.arange(view.length) < view.lengths[..., None]
        return np.stack([
            (shares(view.keys(layer), view.queries(layer), own) + np.float32(self.floor)) * view.value_norms(layer)
            for layer, own in enumerate(used)
        ])  # fmt: skip


def shares(keys: FloatArray, queries: Gaussian, used: AnyArray) -> FloatArray:
    """Expected attention of keys [KV heads, rows, head], among the used rows of each head: [KV heads, rows]."""
    exponents = (keys @ queries.mean[..., None])[..., 0] + ((keys @ queries.covariance) * keys).sum(axis=-1) / 2
    exponents = np.where(used, exponents, np.float32(-np.inf))
    most = exponents.max(axis=-1, keepdims=True)
    weights = np.exp(exponents - np.where(np.isfinite(most), most, 0))
    return np.asarray(weights / np.maximum(weights.sum(axis=-1, keepdims=True), np.float32(1e-30)))
