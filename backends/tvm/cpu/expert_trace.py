"""The experts that a model's routers chose for the last tokens of a run, remembered for plans."""

from __future__ import annotations

import hashlib
from contextlib import suppress

import numpy as np

from edge.backends.tvm.packing.layout import PackedLayout
from edge.errors import CacheError
from edge.formats.gguf import GGUFFile
from edge.storage import cache
from edge.types import AnyArray

_FEWEST = 64  # tokens worth remembering
_SUFFIX = ".npy"


def save_trace(file: GGUFFile, trace: AnyArray) -> None:
    """Save choices, int16 [tokens, layers with experts, choices], in place of earlier ones, unless they are few. Errors
    of the cache folder are ignored."""
    if len(trace) < _FEWEST:
        return
    with suppress(CacheError, OSError), cache.create("traces", _key(file), _SUFFIX, about=file.path.name) as path:
        np.save(path, trace)  # its suffix is NumPy's


def read_trace(file: GGUFFile, layout: PackedLayout) -> AnyArray | None:
    """The saved choices, int16 [tokens, layers with experts, choices]; None if there are none for this model."""
    rows, number = len(layout.experts), max(each.number for each in layout.experts.values())
    with suppress(CacheError, OSError, ValueError):
        if path := cache.find("traces", _key(file), _SUFFIX):
            trace: AnyArray = np.load(path, allow_pickle=False)
            if trace.dtype == np.int16 and trace.shape[1:] == (rows, layout.experts_used) and trace.size:
                return trace if trace.min() >= 0 and trace.max() < number else None
    return None


def _key(file: GGUFFile) -> str:
    """A hash of the file's name and its tensors' shapes; hashing the whole file would take too long for a plan."""
    shapes = [(tensor.name, tensor.shape) for tensor in file.tensors.values()]
    return hashlib.sha256(repr((file.path.name, shapes)).encode()).hexdigest()[:32]
