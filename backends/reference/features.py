"""The input of an EAGLE-3 head; the formula stands at `Features`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.model.cores import Features
from edge.types import FloatArray


def features(engine: Context, core: Features, at: At, x: FloatArray) -> FloatArray:
    """From embeddings, [n, hidden], and features or states that were given, to hidden states; sets
    `joined`, the rows that attention reads."""
    given = at.given if at.given.shape[1] == core.hidden else engine.project(at.given, at, core.output)
    normed = engine.norm(given, at.name("attn_norm_2"))
    engine.joined = np.concatenate([engine.norm(x, at.name("attn_norm")), normed], axis=1)
    return normed if core.normed else given
