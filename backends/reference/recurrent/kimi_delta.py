"""Kimi Delta Attention, token by token; the formula stands at `KimiDelta`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import convolve, rms, sigmoid, silu, softplus
from edge.backends.reference.recurrent.delta_net import unit
from edge.model.cores import KimiDelta
from edge.types import FloatArray


def kimi_delta(engine: Context, core: KimiDelta, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the heads' outputs side by side, [n, width]."""
    weights, state, heads = engine.weights, engine.kv.fixed_state.of(at.layer), (len(x), core.heads, core.size)
    before = state[: (core.kernel - 1) * core.mixed].reshape(core.kernel - 1, core.mixed)
    memory = state[before.size :].reshape(core.heads, core.size, core.size)

    mixed = np.concatenate([engine.project(x, at, name) for name in core.inputs[:3]], axis=1)
    taps = np.concatenate([weights[at.name(name)].reshape(core.width, core.kernel) for name in core.convolutions])
    queries, keys, values = (each.reshape(heads) for each in np.split(silu(convolve(before, mixed, taps)), 3, axis=1))
    queries, keys = unit(queries) / np.float32(np.sqrt(core.size)), unit(keys)

    beta, alpha, z = (engine.project(x, at, name) for name in core.inputs[3:])
    if core.gates:
        alpha, z = (engine.project(each, at, name) for each, name in zip((alpha, z), core.gates, strict=True))
    alpha, rates = (alpha + weights[at.name("ssm_dt.bias")]).reshape(heads), weights[at.name("ssm_a")].reshape(-1, 1)
    decay = np.exp(np.float32(core.bound) * sigmoid(rates * alpha) if core.bound else rates * softplus(alpha))
    beta, out = sigmoid(beta), np.empty_like(values)
    for token in range(len(x)):
        q, k, v = queries[token], keys[token], values[token]
        memory *= decay[token][:, :, None]
        found = np.einsum("hkv,hk->hv", memory, k)
        memory += np.einsum("hk,hv->hkv", k, beta[token][:, None] * (v - found))
        out[token] = np.einsum("hkv,hk->hv", memory, q)
    normed = rms(out, engine.spec.norm_eps) * weights[at.name("ssm_norm")]
    return np.asarray(normed.reshape(len(x), -1) * sigmoid(z))
