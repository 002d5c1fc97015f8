"""A gated causal convolution; the formula stands at `ShortConvolution`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import convolve
from edge.model.cores import ShortConvolution
from edge.types import FloatArray


def short_convolution(engine: Context, core: ShortConvolution, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the input of the output projection, [n, hidden]."""
    before = engine.kv.fixed_state.of(at.layer).reshape(core.kernel - 1, core.hidden)
    b, c, z = np.split(engine.project(x, at, "shortconv.in_proj"), 3, axis=1)
    return np.asarray(c * convolve(before, b * z, engine.weights[at.name("shortconv.conv")]))
