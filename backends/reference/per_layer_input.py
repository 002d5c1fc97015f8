"""The vectors that a token has for each layer; the formulas stand at `PerLayerInput`."""

from __future__ import annotations

import math

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import gelu
from edge.model.cores import PerLayerInput
from edge.model.structure.layers import TABLE, Network
from edge.types import FloatArray, IntArray


def make_inputs(
    engine: Context, network: Network, tokens: IntArray, x: FloatArray, layers: slice = slice(None)
) -> FloatArray:
    """The vectors of these layers, [n, layers, size], from the tokens' embeddings before the first layer, [n, hidden].
    Given rows have those of token 0."""
    size, count = network.layer_inputs, len(range(len(network.layers))[layers])
    shape = (len(x), count, size)
    if not size:
        return np.zeros(shape, np.float32)
    first = size * range(len(network.layers))[layers][0]
    columns = slice(first, first + size * count)
    projected = x @ engine.weights["per_layer_model_proj"][columns].T / np.float32(math.sqrt(x.shape[1]))
    tokens = np.where(tokens < engine.spec.vocab, tokens, 0)
    looked_up = engine.weights[TABLE][tokens, columns] * np.float32(math.sqrt(size))
    normed = engine.norm(projected.reshape(shape), "per_layer_proj_norm")
    return np.asarray((looked_up.reshape(shape) + normed) * np.float32(math.sqrt(0.5)))


def per_layer_input(engine: Context, core: PerLayerInput, at: At, x: FloatArray) -> FloatArray:
    """From hidden states, [n, hidden], to the input of the output projection, [n, size]."""
    return np.asarray(gelu(engine.project(x, at, "inp_gate")) * at.inputs)
