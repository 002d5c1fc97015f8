"""Hidden states after the last layer of a pass, normalised as for the head."""

from __future__ import annotations

import numpy as np

from edge.backends.tvm.packing.layout import PackedLayout
from edge.types import AnyArray, FloatArray


def normed(states: FloatArray, layout: PackedLayout, weights: AnyArray) -> FloatArray:
    """Normalise states, float32 [n, hidden], by the norm before the head. weights: the packed file, uint8."""
    shape, floats = layout.shape, weights.view(np.float32)

    def vector(name: str) -> FloatArray:
        at = layout.places[name].quants // floats.itemsize
        return np.asarray(floats[at : at + shape.hidden])

    if shape.norm == "layer":
        states = states - states.mean(axis=-1, keepdims=True)
    squares = np.mean(np.square(states), axis=-1, keepdims=True)
    found: FloatArray = states / np.sqrt(squares + np.float32(shape.norm_eps))
    found *= vector("output_norm")
    if shape.output_norm_bias:
        found += vector("output_norm.bias")
    return found
