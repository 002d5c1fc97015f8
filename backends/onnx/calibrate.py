"""Calibration of the scales of int8 and int4 rows: one per channel, from the keys and values of some hundred tokens.

RoPE mixes the two values of a pair, so both channels of a key's pair use the largest norm of the pair as their maximum,
which holds at any position.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np

from edge.backends.base import EngineConfig
from edge.backends.calibration_text import TEXT
from edge.backends.head_kv import HeadKV
from edge.backends.onnx.kv import OnnxStore
from edge.backends.onnx.rows import LARGEST
from edge.errors import EngineError
from edge.formats.gguf import GGUFFile
from edge.model.spec import ModelSpec
from edge.model.tokenizer import Tokenizer
from edge.storage import cache
from edge.types import FloatArray, IntArray

_FEW, _MOST, _RANDOM, _AT_ONCE = 64, 768, 512, 32  # tokens: until scales settle; of the text; drawn; per run
_SETTLED = 0.02  # relative change of every scale
_MARGIN = {"int8": 1.6, "int4": 0.75}  # other texts have larger extremes, but four bits cannot cover them
_FIRST_GUESS = 8.0  # the largest value, before any is known


class Engine(Protocol):
    """The part of the engine that calibration uses."""

    spec: ModelSpec
    config: EngineConfig

    @property
    def kv(self) -> HeadKV[OnnxStore]: ...

    def run_shown(self, tokens: IntArray) -> FloatArray:
        """Queries, keys and values of a short run, before RoPE: float32 [layers, n, all heads]."""
        ...


def stored_scales(store: OnnxStore, key: str) -> FloatArray | None:
    """Scales from the cache folder, float32 [2, layers, KV heads, 1, head], or None."""
    path = cache.find("weights", key, _suffix(store.dtype))
    return None if path is None else np.fromfile(path, np.float32).reshape(store.scales.shape)


def calibration_tokens(file: GGUFFile, vocab: int) -> IntArray:
    """The tokens to run, int32 [n]: a text, then random ones.

    Call it before the model is loaded: it loads a tokenizer, whose memory is freed afterwards.
    """
    drawn = np.random.default_rng(1).integers(0, vocab, _RANDOM).astype(np.int32)
    return np.concatenate([Tokenizer(file).encode(TEXT)[:_MOST], drawn])


def find_scales(engine: Engine, key: str, tokens: IntArray) -> FloatArray:
    """Measure scales and store them in the cache folder."""
    scales = _measure(engine, tokens)
    cache.find_or_make(
        "weights", key, _suffix(engine.kv.store.dtype), lambda target: _write(scales, target),
        about=f"scales of {engine.kv.store.dtype} KV rows", expected=scales.nbytes,
    )  # fmt: skip
    return scales


def _write(scales: FloatArray, target: Path) -> None:
    target.write_bytes(scales.tobytes())


def _suffix(dtype: str) -> str:
    return f".{dtype}-scales"


def _measure(engine: Engine, tokens: IntArray) -> FloatArray:
    """Run the engine itself, so that nothing else is loaded, until the scales converge.

    Rows rounded with bad scales disturb the layers above, so scales converge layer by layer.
    """
    store, spec = engine.kv.store, engine.spec
    store.scales[:] = _FIRST_GUESS / LARGEST[store.dtype]
    for _ in range(spec.layers):
        scales = _scales_after(engine, tokens[:_FEW])
        settled = np.abs(scales / store.scales - 1).max() < _SETTLED
        store.scales[:] = scales
        if settled:
            break
    return _scales_after(engine, tokens)


def _scales_after(engine: Engine, tokens: IntArray) -> FloatArray:
    """Scales from the rows of these tokens, computed with the present scales. Raises EngineError if rows are not
    finite."""
    kv, spec = engine.kv, engine.spec
    row = kv.store.row
    most = np.zeros((2, spec.layers, row.heads, row.key), np.float32)
    step = min(_AT_ONCE, engine.config.chunk, kv.capacity)
    for at in range(0, tokens.size, step):
        part = tokens[at : at + step]
        if kv.free < part.size:
            kv.truncate(0)
        with np.errstate(over="ignore", invalid="ignore"):
            most = np.maximum(most, _extremes(engine.run_shown(part), row.heads, row.key))
        if not np.isfinite(most).all():
            raise EngineError("the model's keys or values are no numbers: its weights are damaged or overflow")
    kv.truncate(0)
    scales = most[:, :, :, None] * np.float32(_MARGIN[kv.store.dtype] / LARGEST[kv.store.dtype])
    return np.asarray(np.maximum(scales, np.float32(1e-8)))


def _extremes(shown: FloatArray, kv_heads: int, head: int) -> FloatArray:
    """The largest norm of each pair of keys, and the largest |value|: [2, layers, KV heads, head]."""
    layers, count, _ = shown.shape
    both = shown[:, :, -2 * kv_heads * head :].reshape(layers, count, 2, kv_heads, head)
    keys, values = np.abs(both[:, :, 0]).max(axis=1), np.abs(both[:, :, 1]).max(axis=1)
    one, other = both[:, :, 0, :, : head // 2], both[:, :, 0, :, head // 2 :]
    lengths = np.sqrt(one * one + other * other).max(axis=1)
    keys = np.concatenate([lengths, lengths], axis=-1)
    return np.stack([keys, values])
