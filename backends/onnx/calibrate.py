"""Calibration of the scales of int8 and int4 rows: one per channel, from the keys and values of some hundred tokens.

RoPE mixes the two values of a pair, so both channels of a key's pair use the largest norm of the pair as their maximum,
which holds at any position.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from edge.model.cores import RowShape
from edge.model.structure.spec import ModelSpec
from edge.model.tokens.tokenizer import Tokenizer
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

    def run_shown(self, tokens: IntArray) -> Mapping[int, FloatArray]:
        """Queries, keys and values of a short run, before RoPE, by layer: float32 [n, all heads]."""
        ...


def load_scales(kv: HeadKV[OnnxStore], key: str) -> bool:
    """Read the stores' scales from the cache folder; False if it has none."""
    path = cache.find("weights", key, _suffix(kv.store.dtype))
    if path is None:
        return False
    sizes = np.cumsum([store.scales.size for store in kv.stores])[:-1]
    for store, scales in zip(kv.stores, np.split(np.fromfile(path, np.float32), sizes), strict=True):
        store.scales[:] = scales.reshape(store.scales.shape)
    return True


def calibration_tokens(file: GGUFFile, vocab: int) -> IntArray:
    """The tokens to run, int32 [n]: a text, then random ones.

    Call it before the model is loaded: it loads a tokenizer, whose memory is freed afterwards.
    """
    drawn = np.random.default_rng(1).integers(0, vocab, _RANDOM).astype(np.int32)
    return np.concatenate([Tokenizer(file).encode(TEXT)[:_MOST], drawn])


def find_scales(engine: Engine, key: str, tokens: IntArray) -> None:
    """Measure the stores' scales, and put them into the cache folder."""
    _measure(engine, tokens)
    data = scale_bytes(engine.kv)
    cache.find_or_make(
        "weights", key, _suffix(engine.kv.store.dtype), lambda target: _write(data, target),
        about=f"scales of {engine.kv.store.dtype} KV rows", expected=len(data),
    )  # fmt: skip


def scale_bytes(kv: HeadKV[OnnxStore]) -> bytes:
    return b"".join(store.scales.tobytes() for store in kv.stores)


def _write(data: bytes, target: Path) -> None:
    target.write_bytes(data)


def _suffix(dtype: str) -> str:
    return f".{dtype}-scales"


def _measure(engine: Engine, tokens: IntArray) -> None:
    """Run the engine itself, so that nothing else is loaded, until the scales converge.

    Rows rounded with bad scales disturb the layers above, so scales converge layer by layer.
    """
    stores = engine.kv.stores
    for store in stores:
        store.scales[:] = _FIRST_GUESS / LARGEST[store.dtype]
    for _ in range(engine.spec.layers):
        if max(_rescale(engine, tokens[:_FEW])) < _SETTLED:
            break
    _rescale(engine, tokens)


def _rescale(engine: Engine, tokens: IntArray) -> list[float]:
    """Set each store's scales from the rows of these tokens, computed with the present ones. Returns their largest
    relative changes. Raises EngineError if rows are not finite."""
    kv = engine.kv
    most = [np.zeros(store.scales.shape, np.float32) for store in kv.stores]
    step = min(_AT_ONCE, engine.config.chunk, kv.capacity)
    for at in range(0, tokens.size, step):
        part = tokens[at : at + step]
        if kv.free < part.size:
            kv.truncate(0)
        shown = engine.run_shown(part)
        with np.errstate(over="ignore", invalid="ignore"):
            for store, found in zip(kv.stores, most, strict=True):
                for own, layer in enumerate(store.layers):
                    both = _extremes(shown[layer], store.row)
                    found[:, own, :, 0] = np.maximum(found[:, own, :, 0], both)
        if not all(np.isfinite(found).all() for found in most):
            raise EngineError("the model's keys or values are no numbers: its weights are damaged or overflow")
    kv.truncate(0)
    changes = []
    for store, found in zip(kv.stores, most, strict=True):
        scales = np.maximum(found * np.float32(_MARGIN[store.dtype] / LARGEST[store.dtype]), np.float32(1e-8))
        changes.append(float(np.abs(scales / store.scales - 1).max()))
        store.scales[:] = scales
    return changes


def _extremes(shown: FloatArray, row: RowShape) -> FloatArray:
    """The largest norm of each pair of keys, and the largest |value|: [2, KV heads, head]. Of keys that values share:
    [1, KV heads, head], where those that RoPE does not rotate have no pairs."""
    rows = shown[:, -row.values :].reshape(len(shown), -1, row.heads, row.key)
    first = row.rotated[0] if row.shared else 0
    one, other = np.split(rows[:, 0, :, first:], 2, axis=-1)
    lengths = np.sqrt(one * one + other * other).max(axis=0)
    found = np.abs(rows).max(axis=0)
    found[0, :, first:] = np.concatenate([lengths, lengths], axis=-1)
    return np.asarray(found)
