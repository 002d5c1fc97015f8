"""The KL divergence of each KV dtype for a model, measured on this machine and kept in the cache folder.

`edge eval kv --tasks kl` and `edge search` measure it; `--kv-policy auto` chooses the KV dtype by it. A record belongs
to a model's content, an engine and a version of edge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict

from edge.backends.base import Backend
from edge.devices.keys import key_of
from edge.errors import CacheError, InputError
from edge.formats.gguf import GGUFFile
from edge.formats.onnx_folder import content_hash
from edge.options import AUTO, Options
from edge.records import dataclass
from edge.storage import cache
from edge.storage.versions import edge_version
from edge.values import parse

LEAST_TOKENS = 500  # with fewer predictions, a loss of some hundredths drowns in noise


@dataclass(frozen=True)
class KVLoss:
    """The loss of a full cache in a dtype, against one in the engine's first dtype."""

    kl: float  # nats per prediction
    stderr: float
    tokens: int  # predictions

    def __str__(self) -> str:
        return f"KL {self.kl:.4f} ± {self.stderr:.4f}"


Losses = Mapping[str, KVLoss]
"""By KV dtype."""


def find_losses(file: GGUFFile, backend: Backend, options: Options) -> Losses:
    """The measured losses of a model, by dtypes that the engine has; empty unless `auto` may choose the dtype."""
    if options.kv_policy != AUTO or options.kv_dtype is not None or not cache.entries("losses"):
        return {}  # avoids a hash of the whole file
    with suppress(InputError):  # only the header of a model on the Hub is here
        found = _read(_key(content_hash(file), backend.NAME))
        return {dtype: each for dtype, each in found.items() if dtype in backend.CAPABILITIES.kv_dtypes}
    return {}


def remember_losses(file: GGUFFile, backend: Backend, found: Losses) -> None:
    """Add losses to the model's record. Leaves out losses of too few predictions, or of fewer than the known ones. Does
    nothing if the cache folder cannot be written."""
    found = {dtype: each for dtype, each in found.items() if each.tokens >= LEAST_TOKENS}
    if not found:
        return
    key = _key(content_hash(file), backend.NAME)
    with suppress(CacheError), cache.lock("losses", key):
        known = _read(key)
        more = {
            dtype: each for dtype, each in found.items() if dtype not in known or each.tokens >= known[dtype].tokens
        }
        with cache.create("losses", key, ".json", about=f"KV dtypes of {file.path.name} on {backend.NAME}") as path:
            path.write_text(json.dumps({dtype: asdict(each) for dtype, each in {**known, **more}.items()}))


def _key(sha256: str, engine: str) -> str:
    return key_of(repr((sha256, engine, edge_version())))


def _read(key: str) -> Losses:
    with suppress(CacheError, OSError, ValueError):
        if path := cache.find("losses", key, ".json"):
            return parse(dict[str, KVLoss], json.loads(path.read_bytes()))
    return {}
