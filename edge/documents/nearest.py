"""A graph of an index's vectors (HNSW, by usearch), in a file beside it, where there are too many to compare with all.

It finds candidates, which are then compared exactly. A change of the index makes the file stale, and the end of the
next `edge index` builds another one, also of a damaged file; until then, or if usearch is not installed, all vectors
are compared. The index has the file's hash, since usearch follows what it reads there as addresses.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np

from edge.devices.private import is_private_file
from edge.documents.store import Store
from edge.errors import InputError
from edge.storage.fingerprint import fingerprint
from edge.types import AnyArray, FloatArray

ABOVE = 100_000  # vectors; up to there, a core compares all of them in 0.6 s
EXTRA = "index"
_CANDIDATES = 4  # for each passage that is wanted
_GRAPH = 320  # bytes of a vector's links while the graph is made
_BLOCK = 4096


def lacks_extra(count: int) -> bool:
    """Whether so many vectors want a graph, and usearch is not installed."""
    return count > ABOVE and find_spec("usearch") is None


def build(store: Store, room: int, progress: Callable[[float, float], None]) -> bool:
    """Build the graph, unless it is there. room: bytes of memory that it may take. Returns whether it is there now.
    Raises InputError if it cannot be written."""
    size, count = store.vector_size()
    wanted = count > ABOVE and find_spec("usearch") is not None
    if wanted and _is_whole(store):
        return True
    if not wanted or count * (size + _GRAPH) > room:
        store.near_path.unlink(missing_ok=True)
        return False
    from usearch.index import Index

    graph, done, partial = Index(ndim=size, metric="cos", dtype="i8"), 0, store.near_path.with_suffix(".partial")
    for ids, _, codes in store.vectors(size, _BLOCK):
        graph.add(ids.astype(np.uint64), codes, threads=1)
        done += ids.size
        progress(done, count)
    try:
        graph.save(str(partial))
    except RuntimeError as error:  # of a full disk, too
        raise InputError(f"{partial} cannot be written ({error})") from None
    with suppress(OSError):  # on Windows, another process may read the old one
        os.chmod(partial, 0o600)
        os.replace(partial, store.near_path)
        store.near = _mark(store)
        return True
    return False


def candidates(store: Store, vector: FloatArray, most: int) -> list[int] | None:
    """Ids of the passages whose vectors may be the `most` nearest; None: compare all. vector: float32 [size]."""
    if find_spec("usearch") is None or not _is_whole(store):
        return None
    from usearch.index import Index

    graph = Index.restore(str(store.near_path), view=True)
    if graph is None or graph.ndim != vector.size:
        return None
    codes: AnyArray = np.rint(vector / max(float(np.abs(vector).max()), 1e-12) * 127).astype(np.int8)
    return [int(each) for each in graph.search(codes, _CANDIDATES * most, threads=1).keys]


def _is_whole(store: Store) -> bool:
    """Whether there is a graph of the present vectors, as it was built, which no other user can have written."""
    try:
        return store.near is not None and is_private_file(store.near_path.stat()) and store.near == _mark(store)
    except (OSError, InputError):
        return False


def _mark(store: Store) -> str:
    """The file's SHA-256, and the version of its library: others may have another format."""
    return f"{fingerprint(store.near_path).sha256} usearch {version('usearch')}"
