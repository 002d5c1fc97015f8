"""A feed-forward network."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import ACTIVATIONS
from edge.model.cores import Dense
from edge.types import FloatArray


def dense(engine: Context, core: Dense, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the input of ffn_down, [n, ffn]."""
    activation, up = ACTIVATIONS[core.activation], engine.project(x, at, "ffn_up")
    return np.asarray(activation(engine.project(x, at, "ffn_gate")) * up if core.gated else activation(up))
