"""Pages of KV rows: how many of them a step reads, and which it always reads.

A page is a tile of 16 rows, as keys lie in memory. Its bounds are the greatest and the least value of its stored keys
in each dimension, float16 [2, head]. Compiled code computes them when a step first selects among pages
(cpu/kernels/pages.py). Every write of rows invalidates the bounds of their pages (`NativeStore.bounded`), so prompts,
saved rows and forks need no bounds of their own.
"""

from __future__ import annotations

from edge.backends.base import EngineConfig
from edge.backends.tvm.kv.regions import TILE, allocated_rows

DENSE_LAYERS = 2  # first layers, which read all rows: by Quest's own measurements, they attend to most of them
NEWEST = 4  # newest pages, which are always read, as is the first page
_ALL = 1 << 30
BOUND_BYTES = 2  # of a bound in one dimension


def pages_held(config: EngineConfig) -> int:
    """Pages of a head among which steps select; 0 if they read all."""
    return allocated_rows(config.capacity, uneven=config.uneven) // TILE if config.reads else 0


def pages_read(rows: int) -> int:
    """The most pages that a head reads for a token. rows: `EngineConfig.reads`."""
    return rows // TILE if rows else _ALL


def pages_bounded(length: int, reads: int) -> int:
    """How many first pages have bounds after a step; 0 if it read all rows. length: rows, the step's included."""
    pages = -(-length // TILE)
    return pages - NEWEST if pages > pages_read(reads) else 0


def bounds_bytes(head: int) -> int:
    """Bytes of bounds for each row of a KV head; head: padded."""
    return 2 * head * BOUND_BYTES // TILE
