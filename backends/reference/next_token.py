"""The input of a layer for multi-token prediction; the formula stands at `NextToken`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.model.cores import NextToken
from edge.types import FloatArray


def next_token(engine: Context, _core: NextToken, at: At, x: FloatArray) -> FloatArray:
    """From embeddings, [n, hidden], and the states that were given, to the input of the projection, [n, 2 · hidden]."""
    normed = engine.norm(x, at.name("nextn.enorm")), engine.norm(at.given, at.name("nextn.hnorm"))
    return np.concatenate(normed, axis=1)
