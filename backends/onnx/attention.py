"""Attention of observed queries to the rows of a layer, in NumPy, because ONNX Runtime does not expose it.

Its own score output would hold all queries of a chunk against all rows; this holds a few dozen queries of one layer.
"""

from __future__ import annotations

import math

import numpy as np

from edge.backends.onnx.rows import LARGEST, unscaled
from edge.types import AnyArray, FloatArray


def attention_to(
    rows: AnyArray,
    scales: FloatArray,
    dtype: str,
    queries: FloatArray,
    votes: bool,
    cap: float = 0.0,
    window: FloatArray | None = None,
    sinks: FloatArray | None = None,
) -> FloatArray:
    """The attention that each row receives, averaged over the query heads of a group, summed over queries: float32 [KV
    heads, rows].

    rows: stored keys, [KV heads, rows, stored values], scales [KV heads, 1, head]. queries: float32 [heads, n, head],
    rotated and scaled, of the last n rows; each sees its own row and those before it. votes: count the queries that pay
    a row more than their average instead. cap: soft cap of scores, cap · tanh(score / cap); 0: none. window: a mask
    added to capped scores, [1, heads or 1, n, rows]. sinks: a score of each head that takes its share, [heads].
    """
    kv_heads, count, seen = len(rows), queries.shape[1], rows.shape[1]
    queries = queries.reshape(kv_heads, -1, queries.shape[-1])
    if dtype in LARGEST:
        queries = queries * scales  # instead of all the keys
    scores = queries @ unscaled(rows, dtype).swapaxes(-1, -2)
    if cap:
        scores = cap * np.tanh(scores / np.float32(cap))
    by_query = scores.reshape(kv_heads, -1, count, seen)
    if window is not None:
        by_query += window.reshape(kv_heads if window.shape[1] > 1 else 1, -1, count, seen)
    if count > 1:
        later = np.triu(np.ones((count, count), bool), k=1)
        by_query[..., seen - count :][..., later] = -math.inf
    largest = by_query.max(axis=-1, keepdims=True)
    by_query -= largest
    powers = np.exp(by_query, out=by_query)
    sums = powers.sum(axis=-1, keepdims=True)
    if sinks is not None:
        sums += np.exp(sinks.reshape(kv_heads, -1, 1, 1) - largest)
    if votes:
        average = 1 / np.arange(seen - count + 1, seen + 1, dtype=np.float32)
        return np.asarray((powers > sums * average[:, None]).sum(axis=2, dtype=np.float32).mean(axis=1))
    shares = 1 / (sums * np.float32(powers.shape[1]))  # of the mean over the group
    return np.asarray((shares.reshape(kv_heads, 1, -1) @ powers.reshape(kv_heads, -1, seen))[:, 0])
