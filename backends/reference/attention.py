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
    mixed = (weights @ values[:, None]).reshape(core.heads, len(x), -1)
    if core.latent:
        mixed = mixed @ per_head(engine, core, at, "attn_v_b").swapaxes(-1, -2)
        if core.latent.gated:
            mixed = mixed * sigmoid(engine.project(x, at, "attn_gate")).T[..., None]
    out = mixed.swapaxes(0, 1).reshape(len(x), -1)
    return np.asarray(out * sigmoid(engine.project(x, at, "attn_q_gate")) if core.gated else out)


def paid(engine: Context, core: Attention, at: At, x: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Store the rows of x; return attention, [KV heads, group, n, rows], and the values of all rows so far, [KV heads,
    rows, size]."""
    kv, rotation = engine.kv, engine.kv.rope.rotation
    if core.across:
        return _across(engine, core, at, heads_of(engine, core, at, x, "attn_q"))
    queries = latent_queries(engine, core, at, x) if core.latent else heads_of(engine, core, at, x, "attn_q")
    if core.rows_of is None:
        made = latent_rows(engine, core, at, x) if core.latent else heads_of(engine, core, at, x, "attn_k")
        kv.keys[at.layer][:, at.rows] = rotation.rotate(made, at.layer, at.positions)
    if core.rows_of is None and not core.shared_values:
        made = made[..., : core.row.value] if core.latent else heads_of(engine, core, at, x, "attn_v")
        kv.values[at.layer][:, at.rows] = rms(made, engine.spec.norm_eps) if core.unit_values else made
    source = core.source(at.layer)
    keys, values = kv.keys[source][:, : at.rows.stop], kv.values[source][:, : at.rows.stop]

    # Each KV head serves a group of query heads: [KV heads, group, n, rows].
    queries = rotation.rotate(queries, at.layer, at.positions) * np.float32(core.scale)
    positions = kv.positions[at.rows]
    if core.temperature:
        queries *= temperatures(core.temperature, positions)[:, None]
    queries = queries.reshape(core.kv_heads, core.heads // core.kv_heads, len(x), core.head_dim)
    scores = soft_cap(queries @ keys[:, None].swapaxes(-1, -2), core.score_cap)
    rows = np.arange(at.rows.stop)[None, :]
    sees = at.sees if core.spans else np.arange(at.rows.start, at.rows.stop)
    hidden = (rows > sees[:, None]) | (rows < np.reshape(at.begins, (-1, 1)))
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
    keys, values = engine.across[at.layer]
    queries = queries.reshape(core.kv_heads, core.group, -1, core.head_dim) * np.float32(core.scale)
    return softmax(queries @ keys[:, None].swapaxes(-1, -2)), values


def latent_queries(engine: Context, core: Attention, at: At, x: FloatArray) -> FloatArray:
    """Queries of the rows of latent attention, [heads, n, size]."""
    assert core.latent is not None
    if core.latent.rank:
        x = engine.norm(engine.project(x, at, "attn_q_a"), at.name("attn_q_a_norm"))
    queries = engine.project(x, at, "attn_q_b" if core.latent.rank else "attn_q")
    plain, rotated = np.split(queries.reshape(len(x), core.heads, -1).swapaxes(0, 1), [core.latent.plain], axis=-1)
    return np.concatenate([plain @ per_head(engine, core, at, "attn_k_b").swapaxes(-1, -2), rotated], axis=-1)


def latent_rows(engine: Context, core: Attention, at: At, x: FloatArray) -> FloatArray:
    """Keys of latent attention before RoPE, [1, n, size], which begin with the values."""
    latent, rotated = np.split(engine.project(x, at, "attn_kv_a_mqa"), [core.row.value], axis=-1)
    return np.concatenate([engine.norm(latent, at.name("attn_kv_a_norm")), rotated], axis=-1)[None]


def per_head(engine: Context, core: Attention, at: At, name: str) -> FloatArray:
    """A matrix of each head, [heads, rows, columns]."""
    matrices = engine.weights[at.name(name)]
    return matrices.reshape(core.heads, -1, matrices.shape[-1])


def heads_of(engine: Context, core: Attention, at: At, x: FloatArray, name: str) -> FloatArray:
    """[heads, n, size], each head normalised where the model does so."""
    size = core.row.value if name == "attn_v" else core.head_dim
    heads = engine.project(x, at, name).reshape(len(x), -1, size).swapaxes(0, 1)
    return engine.norm(heads, at.name(f"{name}_norm")) if core.head_norms and name != "attn_v" else heads
