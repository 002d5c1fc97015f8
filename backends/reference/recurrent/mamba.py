"""Mamba-2, token by token; the formula stands at `Mamba`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import convolve, rms, silu, softplus
from edge.model.cores import Mamba
from edge.types import FloatArray


def mamba(engine: Context, core: Mamba, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the gated outputs of all heads, [n, width]."""
    weights, state, (bias, of_steps, rate, skip) = (
        engine.weights,
        engine.kv.fixed_state.of(at.layer),
        (engine.weights[at.name(name)] for name in ("ssm_conv1d.bias", "ssm_dt.bias", "ssm_a", "ssm_d")),
    )
    before = state[: (core.kernel - 1) * core.mixed].reshape(core.kernel - 1, core.mixed)
    memory = state[before.size :].reshape(core.heads, core.size, core.head_dim)

    z, inputs, steps = np.split(engine.project(x, at, "ssm_in"), [core.width, core.width + core.mixed], axis=1)
    mixed = silu(convolve(before, inputs, weights[at.name("ssm_conv1d")]) + bias)
    values, b, c = np.split(mixed, [core.width, core.width + core.groups * core.size], axis=1)
    values = values.reshape(len(x), core.heads, core.head_dim)
    b, c = (
        np.repeat(each.reshape(len(x), core.groups, core.size), core.heads // core.groups, axis=1) for each in (b, c)
    )
    steps = softplus(steps + of_steps)
    decay = np.exp(rate * steps)
    out = np.empty_like(values)
    for token in range(len(x)):
        memory *= decay[token][:, None, None]
        memory += np.einsum("hn,hp->hnp", b[token], steps[token][:, None] * values[token])
        out[token] = np.einsum("hnp,hn->hp", memory, c[token]) + skip[:, None] * values[token]
    gated = out.reshape(len(x), -1) * silu(z)
    if not core.normed:
        return np.asarray(gated)
    normed = rms(gated.reshape(len(x), core.groups, -1), engine.spec.norm_eps).reshape(len(x), -1)
    return np.asarray(normed * weights[at.name("ssm_norm")])
