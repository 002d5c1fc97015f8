"""Measures the cost of reading a memory-mapped file repeatedly, when its pages are mapped on access and evicted."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edge.devices.private import make_private_folder

_BLOCK = 2 << 20  # bytes read and evicted together, like streamed weights
_BLOCKS = 16
_MOST_BLOCKS = 64
_ROUNDS = 12  # the quickest counts: other processes slow the others down
_COLD_ROUNDS = 2
_HUGEPAGE = 14  # of Linux's madvise


@dataclass(frozen=True)
class Paging:
    """Measured seconds per byte, in addition to the time of a read from memory."""

    cached: float  # pages come from the page cache
    disk: float  # pages come from the disk


def measure_paging(folder: Path, threads: int, known: Path | None = None) -> Paging | None:
    """Measure on a temporary file of 32 MiB in the folder, with as many threads as the run has: they delay each other
    when pages are mapped and evicted.

    known: a long file on which to measure `cached` instead, since it depends on the page sizes in the page cache.
    None if it cannot be measured: the system lacks madvise's eviction, or the folder has no room.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or not hasattr(os, "posix_fadvise"):
        return None
    try:
        make_private_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file, ThreadPoolExecutor(threads) as pool:
            for _ in range(_BLOCKS):
                file.write(os.urandom(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
            disk = _from_disk(_Reader(file.fileno(), _BLOCKS, pool, threads))
            if known is not None and (blocks := known.stat().st_size // _BLOCK) >= _BLOCKS:
                with open(known, "rb") as other:
                    return Paging(_cached(_Reader(other.fileno(), min(blocks, _MOST_BLOCKS), pool, threads)), disk)
            return Paging(_cached(_Reader(file.fileno(), _BLOCKS, pool, threads)), disk)
    except OSError:
        return None


class _Reader:
    """Reads a mapped file with several threads, in large pages where the system has them, like weights."""

    def __init__(self, file: int, count: int, pool: ThreadPoolExecutor, threads: int) -> None:
        self.file, self.nbytes = file, count * _BLOCK
        self.mapped = mmap.mmap(file, self.nbytes, prot=mmap.PROT_READ)  # closed with its last view
        with suppress(OSError):
            self.mapped.madvise(_HUGEPAGE)
        self._view = np.frombuffer(self.mapped, np.int64).reshape(count, -1)
        self._shares = [range(thread, count, threads) for thread in range(threads)]
        self._pool = pool

    def seconds(self, *, forget: bool) -> float:
        """Time of one complete read, in seconds. forget: evict each block behind the reader."""
        started = time.perf_counter()
        list(self._pool.map(self._read, self._shares, [forget] * len(self._shares)))
        return time.perf_counter() - started

    def _read(self, blocks: range, forget: bool) -> None:
        for number in blocks:
            self._view[number].sum()
            if forget:
                self.mapped.madvise(mmap.MADV_DONTNEED, number * _BLOCK, _BLOCK)


def _from_disk(reader: _Reader) -> float:
    """The faster of two rounds, minus the fastest with resident pages."""
    cold, warm = [], []
    for _ in range(_COLD_ROUNDS):
        reader.mapped.madvise(mmap.MADV_DONTNEED)
        os.posix_fadvise(reader.file, 0, 0, os.POSIX_FADV_DONTNEED)
        cold.append(reader.seconds(forget=False))
        warm.append(reader.seconds(forget=False))
    return max(0.0, min(cold) - min(warm)) / reader.nbytes


def _cached(reader: _Reader) -> float:
    """The fastest round that evicts its pages after use, minus the fastest with pages that stay."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for forget, found in times.items():
            reader.seconds(forget=False)  # all pages become resident, and the first ones leave the CPU's caches
            if forget:
                reader.mapped.madvise(mmap.MADV_DONTNEED)
            found.append(reader.seconds(forget=forget))
    return max(0.0, min(times[True]) - min(times[False])) / reader.nbytes
