"""Softmax attention."""

from __future__ import annotations

import numpy as np

from edge.backends.reference.context import At, Context
from edge.backends.reference.functions import rms, sigmoid, soft_cap, softmax
from edge.model.architectures.angles import temperatures
from edge.model.cores import Attention
from edge.types import FloatArray


def attention(engine: Context, core: Attention, at: At, x: FloatArray) -> FloatArray:
    """From normalised rows, [n, hidden], to the heads' outputs side by side, [n, width]."""
    x = engine.joined if core.joined else x
    weights, values = paid(engine, core, at, x)
    mixed = weights @ values[:, None]
    out = mixed.reshape(core.heads, len(x), -1).swapaxes(0, 1).reshape(len(x), -1)
    return np.asarray(out * sigmoid(engine.project(x, at, "attn_q_gate")) if core.gated else out)


def paid(engine: Context, core: Attention, at: At, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Store the rows of x; return attention, [KV heads, group, n, rows], and the values of all rows so far, [KV heads,
    rows, size]."""
    kv, rotation = engine.kv, engine.kv.rope.rotation
    queries = heads_of(engine, core, at, x, "attn_q")
    if core.across:
        return _across(engine, core, at, queries)
    if core.rows_of is None:
        kv.keys[at.layer][:, at.rows] = rotation.rotate(heads_of(engine, core, at, x, "attn_k"), at.layer, at.positions)
    if core.rows_of is None and not core.shared_values:
        made = heads_of(engine, core, at, x, "attn_v")
        kv.values[at.layer][:, at.rows] = rms(made, engine.spec.norm_eps) if core.unit_values else made
    source = at.layer if core.rows_of is None else core.rows_of
    keys, values = kv.keys[source][:, : at.rows.stop], kv.values[source][:, : at.rows.stop]

    # Each KV head serves a group of query heads: [KV heads, group, n, rows].
    queries = rotation.rotate(queries, at.layer, at.positions) * np.float32(core.scale)
    positions = kv.positions[at.rows]
    if core.temperature:
        queries *= temperatures(core.temperature, positions)[:, None]
    queries = queries.reshape(core.kv_heads, core.heads // core.kv_heads, len(x), core.head_dim)
    scores = soft_cap(queries @ keys[:, None].swapaxes(-1, -2), core.score_cap)
    rows = np.arange(at.rows.stop)[None, :]
    hidden = (rows > at.sees[:, None]) | (rows < np.reshape(at.begins, (-1, 1)))
    if core.window and not core.causal:
        hidden |= np.abs(rows - np.arange(at.rows.start, at.rows.stop)[:, None]) > core.window // 2
    elif core.window:
        hidden |= kv.positions[None, : at.rows.stop] <= positions[:, None] - core.window
    scores = np.where(hidden, np.float32(-np.inf), scores)
    if core.sinks:
        sinks = engine.weights[at.name("attn_sinks")].reshape(core.kv_heads, -1, 1, 1)
        scores = np.concatenate([scores, np.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    return softmax(scores)[..., : at.rows.stop], values


def _across(engine: Context, core: Attention, at: At, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
    """As `paid`, of rows that were given: every token sees all of them."""
    keys, values = engine.crossed[at.layer]
    queries = queries.reshape(core.kv_heads, core.group, -1, core.head_dim) * np.float32(core.scale)
    return softmax(queries @ keys[:, None].swapaxes(-1, -2)), values


def heads_of(engine: Context, core: Attention, at: At, x: FloatArray, name: str) -> FloatArray:
    """[heads, n, size], each head normalised where the model does so."""
    size = core.row.value if name == "attn_v" else core.head_dim
    heads = engine.project(x, at, name).reshape(len(x), -1, size).swapaxes(0, 1)
    return engine.norm(heads, at.name(f"{name}_norm")) if core.head_norms and name != "attn_v" else heads
