"""Find in the cache folder, or make, what a policy must know of a model (backends/learned.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge.backends.expected import QueryMoments
from edge.backends.importance import RowImportance
from edge.backends.learned import Learned, learned_bytes
from edge.backends.reference.importance import check_importance, fit, fitting_bytes
from edge.backends.reference.queries import check_queries, measure, measuring_bytes
from edge.formats.gguf import GGUFFile
from edge.kv.policy import Needs
from edge.model.layers import Network
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network
from edge.storage import cache
from edge.storage.fingerprint import fingerprint
from edge.types import AnyArray, FloatArray, IntArray


@dataclass(frozen=True)
class _Kind:
    suffix: str
    about: str
    dtype: type[np.floating[Any]]  # of the file
    check: Callable[[ModelSpec], None]
    make: Callable[[GGUFFile, ModelSpec, IntArray], list[FloatArray]]
    making_bytes: Callable[[GGUFFile, ModelSpec], int]
    of: Callable[[Network, AnyArray], Learned]


_QUERIES = _Kind(
    "queries", "expected queries", np.float16, check_queries, measure, measuring_bytes, QueryMoments.of
)  # fmt: skip
_IMPORTANCE = _Kind(
    "importance", "importance of rows", np.float32, check_importance, fit, fitting_bytes, RowImportance.of
)  # fmt: skip


def stored(file: GGUFFile, spec: ModelSpec, needs: Needs) -> Learned | None:
    """From the cache folder, or None."""
    path = cache.find("weights", fingerprint(file.path).sha256, _suffix(spec, needs))
    return _load(path, spec, needs) if path else None


def find(file: GGUFFile, spec: ModelSpec, needs: Needs, tokens: IntArray) -> Learned:
    """Made with these tokens if it is not in the cache folder.

    Raises UnsupportedError for models that this is not made for, ModelFormatError if it is not finite.
    """
    kind = _kind(needs)
    kind.check(spec)

    def write(target: Path) -> None:
        target.write_bytes(b"".join(each.astype(kind.dtype).tobytes() for each in kind.make(file, spec, tokens)))

    path = cache.find_or_make(
        "weights", fingerprint(file.path).sha256, _suffix(spec, needs), write, about=f"{kind.about} of {spec.name}",
        expected=learned_bytes(find_network(spec), needs),
    )  # fmt: skip
    return _load(path, spec, needs)


def making_bytes(file: GGUFFile, spec: ModelSpec, needs: Needs) -> int:
    """Peak bytes of `find`, estimated; 0 if it is stored."""
    return 0 if stored(file, spec, needs) else _kind(needs).making_bytes(file, spec)


def _kind(needs: Needs) -> _Kind:
    return _QUERIES if needs.expects else _IMPORTANCE


def _suffix(spec: ModelSpec, needs: Needs) -> str:
    """With the size, so that no other version of edge's is taken for it."""
    return f".{learned_bytes(find_network(spec), needs)}.{_kind(needs).suffix}"


def _load(path: Path, spec: ModelSpec, needs: Needs) -> Learned:
    kind = _kind(needs)
    return kind.of(find_network(spec), np.frombuffer(path.read_bytes(), kind.dtype))
