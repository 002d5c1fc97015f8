"""The largest logits, found by blocks: drawing from 49k or 262k of them costs little more than reading them."""

from __future__ import annotations

import numpy as np

from edge.types import FloatArray, IntArray

_BLOCK = 64  # logits per block


def top_k(logits: FloatArray, k: int) -> IntArray:
    """Ids of the k largest logits, largest first.

    The k-th largest of the blocks' maxima is a lower bound for the k-th largest logit, so only what reaches it
    has to be sorted.
    """
    blocks = logits.size // _BLOCK
    if k < blocks:
        maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        candidates = np.flatnonzero(logits >= np.partition(maxima, blocks - k)[blocks - k])
    else:
        candidates = np.arange(logits.size)
    order = np.argsort(-logits[candidates], kind="stable")[:k]
    return candidates[order].astype(np.int32)
