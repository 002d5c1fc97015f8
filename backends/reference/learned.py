"""Find in the cache folder, or make, what a policy must know of a model (backends/learned.py)."""

from __future__ import annotations

from edge.backends.importance import load_importance, save_importance
from edge.backends.learned import Learned, learned_bytes
from edge.backends.reference.importance import check_importance, fit, fitting_bytes
from edge.backends.reference.queries import find_moments, measuring_bytes, stored_moments
from edge.formats.gguf import GGUFFile
from edge.kv.policy import Needs
from edge.model.spec import ModelSpec
from edge.model.tensors import find_network
from edge.storage import cache
from edge.storage.fingerprint import fingerprint
from edge.types import IntArray

_SUFFIX = ".importance"


def stored(file: GGUFFile, spec: ModelSpec, needs: Needs) -> Learned | None:
    """From the cache folder, or None."""
    if needs.expects:
        return stored_moments(file, spec)
    network, path = find_network(spec), cache.find("weights", fingerprint(file.path).sha256, _SUFFIX)
    whole = path is not None and path.stat().st_size == learned_bytes(network, needs)
    return load_importance(network, path) if path is not None and whole else None


def find(file: GGUFFile, spec: ModelSpec, needs: Needs, tokens: IntArray) -> Learned:
    """Made with these tokens if it is not in the cache folder.

    Raises UnsupportedError for models that this is not made for, ModelFormatError if it is not finite.
    """
    if needs.expects:
        return find_moments(file, spec, tokens)
    check_importance(spec)
    path = cache.find_or_make(
        "weights", fingerprint(file.path).sha256, _SUFFIX,
        lambda target: save_importance(fit(file, spec, tokens), target),
        about=f"importance of rows of {spec.name}", expected=learned_bytes(find_network(spec), needs),
    )  # fmt: skip
    return load_importance(find_network(spec), path)


def making_bytes(file: GGUFFile, spec: ModelSpec, needs: Needs) -> int:
    """Peak bytes of `find`, estimated; 0 if it is stored."""
    if stored(file, spec, needs):
        return 0
    return measuring_bytes(file, spec) if needs.expects else fitting_bytes(file, spec)
