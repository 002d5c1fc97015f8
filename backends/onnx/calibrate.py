"""Scales of int8 and int4 rows: one for every channel, from what a few hundred tokens make of it.

RoPE turns the two values of a pair into each other, so a key's channels share the largest length of their pair, which
holds at any position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from edge import cache
from edge.backends.onnx.rows import LARGEST
from edge.types import FloatArray

if TYPE_CHECKING:
    from edge.backends.onnx.engine import OnnxEngine

_TOKENS, _STEP = 128, 32
_SETTLED = 0.02  # relative change of every scale
_MARGIN = 1.1  # other texts have other extremes
_FIRST_GUESS = 8.0  # the largest value, before any is known


def find_scales(engine: OnnxEngine, key: str) -> FloatArray:
    """float32 [2, layers, KV heads, 1, head], from the cache folder; measured first if they are not there."""
    shape, dtype = engine.kv.scales.shape, engine.kv.dtype
    path = cache.find_or_make(
        "weights", key, f".{dtype}-scales", lambda target: target.write_bytes(_measure(engine).tobytes()) and None,
        about=f"scales of {dtype} KV rows", expected=4 * engine.kv.scales.size,
    )  # fmt: skip
    return np.fromfile(path, np.float32).reshape(shape)


def _measure(engine: OnnxEngine) -> FloatArray:
    """With the engine itself, so that nothing more is loaded, and again until scales settle: rows that were rounded
    with bad ones disturb the layers above. They must settle, layer by layer, as a layer depends on those below it."""
    kv, spec = engine.kv, engine.spec
    largest = np.float32(LARGEST[kv.dtype])
    tokens = np.random.default_rng(1).integers(0, spec.vocab, min(_TOKENS, kv.capacity)).astype(np.int32)
    kv.scales[:] = _FIRST_GUESS / largest
    for _ in range(spec.layers + 1):
        most = np.zeros((2, spec.layers, spec.kv_heads, spec.head_dim), np.float32)
        for at in range(0, tokens.size, min(_STEP, engine.config.chunk)):
            shown = engine.run_shown(tokens[at : at + min(_STEP, engine.config.chunk)])
            most = np.maximum(most, _extremes(shown, spec.kv_heads, spec.head_dim))
        kv.truncate(0)
        scales = np.maximum(most[:, :, :, None] * np.float32(_MARGIN) / largest, np.float32(1e-8))
        settled = np.abs(scales / kv.scales - 1).max() < _SETTLED
        kv.scales[:] = scales
        if settled:
            break
    return kv.scales.copy()


def _extremes(shown: FloatArray, kv_heads: int, head: int) -> FloatArray:
    """Of keys, lengths of pairs; of values, their size: [2, layers, KV heads, head]."""
    layers, count, _ = shown.shape
    both = shown[:, :, -2 * kv_heads * head :].reshape(layers, count, 2, kv_heads, head)
    keys, values = np.abs(both[:, :, 0]).max(axis=1), np.abs(both[:, :, 1]).max(axis=1)
    one, other = both[:, :, 0, :, : head // 2], both[:, :, 0, :, head // 2 :]
    lengths = np.sqrt(one * one + other * other).max(axis=1)
    keys = np.concatenate([lengths, lengths], axis=-1)
    return np.stack([keys, values])
