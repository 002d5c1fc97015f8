"""What it costs to read a file through the memory map again and again: pages come as they are touched, and go."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

import numpy as np

from edge.types import AnyArray

_BLOCK = 2 << 20  # bytes that go together, as when weights are streamed
_MOST = 64 << 20  # bytes of the file that are tried
_ROUNDS = 5


def paging_cost(path: Path) -> float | None:
    """Seconds per byte of a file in the page cache, beyond reading memory. Measured here, in a few tens of ms.

    None where it cannot be measured: the system has no such advice, the file is shorter than a block or unreadable.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return None
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            return _measure(mapped)
    except (OSError, ValueError):  # an empty file cannot be mapped
        return None


def _measure(mapped: mmap.mmap) -> float | None:
    blocks = min(len(mapped), _MOST) // _BLOCK
    if not blocks:
        return None
    view = np.frombuffer(mapped, np.uint8, blocks * _BLOCK).reshape(blocks, -1, mmap.PAGESIZE)[:, :, 0]
    try:
        _touch(view)  # into the page cache, if it was not there
        there, anew = [], []
        for _ in range(_ROUNDS):
            there.append(_seconds(mapped, view, drop=False))
            anew.append(_seconds(mapped, view, drop=True))
            _touch(view)
        return max(0.0, min(anew) - min(there)) / (blocks * _BLOCK)
    finally:
        del view  # before the map is closed


def _seconds(mapped: mmap.mmap, view: AnyArray, *, drop: bool) -> float:
    if drop:
        mapped.madvise(mmap.MADV_DONTNEED)
    started = time.perf_counter()
    for number, block in enumerate(view):
        _touch(block)
        if drop:
            mapped.madvise(mmap.MADV_DONTNEED, number * _BLOCK, _BLOCK)
    return time.perf_counter() - started


def _touch(pages: AnyArray) -> None:
    """Read one byte of each."""
    pages.max()
