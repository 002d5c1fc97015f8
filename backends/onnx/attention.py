"""What observed queries pay to the rows of a layer: done in NumPy, as ONNX Runtime does not tell.

Its own score output would hold all queries of a chunk against all rows; this holds a few dozen queries of one layer.
"""

from __future__ import annotations

import math

import numpy as np

from edge.backends.onnx.rows import LARGEST, unscaled
from edge.types import AnyArray, FloatArray


def attention_to(
    rows: AnyArray, scales: FloatArray, dtype: str, queries: FloatArray, query_scale: float
) -> FloatArray:
    """The sum over queries, and mean over the query heads of a group, of attention: float32 [KV heads, rows].

    rows: stored keys, [KV heads, rows, stored values], scales [KV heads, 1, head]; the last are those of the queries,
    float32 [heads, n, head], rotated, each of which sees its own row and those before it.
    """
    kv_heads, count, seen = len(rows), queries.shape[1], rows.shape[1]
    queries = queries.reshape(kv_heads, -1, queries.shape[-1]) * np.float32(query_scale)
    if dtype in LARGEST:
        queries = queries * scales  # instead of all the keys
    scores = queries @ unscaled(rows, dtype).swapaxes(-1, -2)
    by_query = scores.reshape(kv_heads, -1, count, seen)
    if count > 1:
        later = np.triu(np.ones((count, count), bool), k=1)
        by_query[..., seen - count :][..., later] = -math.inf
    by_query -= by_query.max(axis=-1, keepdims=True)
    np.exp(by_query, out=by_query)
    by_query /= by_query.sum(axis=-1, keepdims=True)
    return np.asarray(by_query.sum(axis=2).mean(axis=1))
