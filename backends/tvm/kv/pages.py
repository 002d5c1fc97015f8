"""Pages of KV rows of which a step reads some: how many, and which in any case.

A page is a tile of 16 rows, as keys lie in memory. Its bounds are the greatest and the least value of its keys in each
dimension, float16 [2, head], in the form in which rows are stored. Compiled code makes them when a step first chooses
among pages (cpu/kernels/pages.py), from the rows as they are then: whatever writes rows forgets the bounds of their
pages (`NativeStore.bounded`), so that prompts, saved rows and forks need no bounds of their own.
"""

from __future__ import annotations

from edge.backends.base import EngineConfig
from edge.backends.tvm.kv.regions import TILE, allocated_rows

DENSE_LAYERS = 2  # the first ones read all rows: by Quest's own measurements, they attend to most of them
NEWEST = 4  # pages that are read in any case, beside the first page
_ALL = 1 << 30
BOUND_BYTES = 2  # of a bound in one dimension


def pages_held(config: EngineConfig) -> int:
    """Pages of a head, among which steps choose; 0 if they read all."""
    return allocated_rows(config.capacity, uneven=config.uneven) // TILE if config.reads else 0


def pages_read(rows: int) -> int:
    """Pages that a head reads for a token, at most, by `EngineConfig.reads`."""
    return rows // TILE if rows else _ALL


def pages_bounded(length: int, reads: int) -> int:
    """The pages whose bounds exist after a step with `length` rows, its own among them; 0: the step read all rows."""
    pages = -(-length // TILE)
    return pages - NEWEST if pages > pages_read(reads) else 0


def bounds_bytes(head: int) -> int:
    """Bytes of bounds for each row of a KV head; head: padded."""
    return 2 * head * BOUND_BYTES // TILE
