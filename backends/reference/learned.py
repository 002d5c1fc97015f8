"""Find in the cache folder, or fit, the importance of a model's rows (backends/importance.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge.backends.importance import RowImportance, importance_bytes
from edge.backends.reference.importance import check_importance, fit, fitting_bytes
from edge.formats.gguf import GGUFFile
from edge.model.structure.spec import ModelSpec
from edge.model.tensors import find_network
from edge.storage import cache
from edge.storage.fingerprint import fingerprint
from edge.types import IntArray


def stored(file: GGUFFile, spec: ModelSpec) -> RowImportance | None:
    """The model's importance from the cache folder, or None."""
    path = cache.find("weights", fingerprint(file.path).sha256, _suffix(spec))
    return _load(path, spec) if path else None


def find(file: GGUFFile, spec: ModelSpec, tokens: IntArray) -> RowImportance:
    """The model's importance, from the cache folder or else fitted to these tokens.

    Raises UnsupportedError for models whose rows cannot be ranked, ModelFormatError if it is not finite.
    """
    check_importance(spec)

    def write(target: Path) -> None:
        target.write_bytes(b"".join(each.astype(np.float32).tobytes() for each in fit(file, spec, tokens)))

    path = cache.find_or_make(
        "weights", fingerprint(file.path).sha256, _suffix(spec), write, about=f"importance of rows of {spec.name}",
        expected=importance_bytes(find_network(spec)),
    )  # fmt: skip
    return _load(path, spec)


def find_for(file: GGUFFile, spec: ModelSpec, encode: Callable[[str], IntArray]) -> RowImportance:
    """As `find`, fitted to the calibration text. encode: makes its tokens, where they are needed."""
    from edge.backends.calibration_text import TEXT  # here: few sessions fit

    return stored(file, spec) or find(file, spec, encode(TEXT))


def making_bytes(file: GGUFFile, spec: ModelSpec) -> int:
    """Peak bytes of `find`, estimated; 0 if it is stored."""
    return 0 if stored(file, spec) else fitting_bytes(file, spec)


def _suffix(spec: ModelSpec) -> str:
    """The size in the suffix tells files of other versions of edge apart."""
    return f".{importance_bytes(find_network(spec))}.importance"


def _load(path: Path, spec: ModelSpec) -> RowImportance:
    return RowImportance.of(find_network(spec), np.frombuffer(path.read_bytes(), np.float32))
