"""Mamba-1, token by token; the formula stands at `SelectiveScan`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import convolve, rms, silu, softplus
from edge.model.cores import SelectiveScan
from edge.types import FloatArray


def selective_scan(engine: Context, core: SelectiveScan, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the gated outputs of all channels, [n, width]."""
    weights, state = engine.weights, engine.kv.fixed_state.of(at.layer)
    before = state[: (core.kernel - 1) * core.width].reshape(core.kernel - 1, core.width)
    memory = state[before.size :].reshape(core.tiles, core.size, -1)

    inputs, z = np.split(engine.project(x, at, "ssm_in"), 2, axis=1)
    values = silu(convolve(before, inputs, weights[at.name("ssm_conv1d")]) + weights[at.name("ssm_conv1d.bias")])
    selected, parts = engine.project(values, at, "ssm_x"), list[FloatArray]()
    for name, first, count in core.parts:
        part = selected[:, first : first + count]
        if core.norms:
            part = rms(part, core.epsilon) * weights.get(at.name(name), np.float32(1))
        parts.append(part)
    dt, b, c = parts
    rates = weights[at.name("ssm_a")].reshape(core.tiles, -1, core.size).swapaxes(1, 2)
    steps = softplus(engine.project(dt, at, "ssm_dt")).reshape(len(x), core.tiles, 1, -1)
    changes = steps * values.reshape(steps.shape)
    out = np.empty((len(x), core.tiles, rates.shape[2]), np.float32)
    for token in range(len(x)):
        memory *= np.exp(rates * steps[token])
        memory += b[token][:, None] * changes[token]
        out[token] = np.einsum("tnl,n->tl", memory, c[token])
    return np.asarray((out.reshape(values.shape) + weights[at.name("ssm_d")] * values) * silu(z))
