"""A gated delta net, token by token; the formula stands at `DeltaNet`."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import convolve, rms, sigmoid, silu, softplus
from edge.model.cores import DeltaNet
from edge.types import FloatArray

_EPSILON = 1e-6  # of the lengths of queries and keys


def delta_net(engine: Context, core: DeltaNet, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the heads' outputs side by side, [n, width]."""
    weights, state = engine.weights, engine.kv.fixed_state.of(at.layer)
    before = state[: (core.kernel - 1) * core.mixed].reshape(core.kernel - 1, core.mixed)
    memory = state[before.size :].reshape(core.heads, core.size, core.value_size)

    mixed = silu(convolve(before, engine.project(x, at, "attn_qkv"), weights[at.name("ssm_conv1d")]))
    parts = np.split(mixed, [core.key_heads * core.size, 2 * core.key_heads * core.size], axis=1)
    queries, keys = (unit(part.reshape(len(x), core.key_heads, core.size)) for part in parts[:2])
    key_head = np.arange(core.heads) % core.key_heads
    queries, keys = queries[:, key_head] / np.float32(np.sqrt(core.size)), keys[:, key_head]
    values = parts[2].reshape(len(x), core.heads, core.value_size)

    steps = softplus(engine.project(x, at, "ssm_alpha") + weights[at.name("ssm_dt.bias")])
    decay, beta = np.exp(weights[at.name("ssm_a")] * steps), sigmoid(engine.project(x, at, "ssm_beta"))
    out = np.empty_like(values)
    for token in range(len(x)):
        q, k, v = queries[token], keys[token], values[token]
        memory *= decay[token][:, None, None]
        found = np.einsum("hkv,hk->hv", memory, k)
        memory += np.einsum("hk,hv->hkv", k, beta[token][:, None] * (v - found))
        out[token] = np.einsum("hkv,hk->hv", memory, q)
    normed = rms(out, engine.spec.norm_eps) * weights[at.name("ssm_norm")]
    return np.asarray(normed.reshape(len(x), -1) * silu(engine.project(x, at, "attn_gate")))


def unit(x: FloatArray) -> FloatArray:
    """Vectors of length 1."""
    return np.asarray(x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + np.float32(_EPSILON)))
