"""What it costs to read a file through the memory map again and again: pages come as they are touched, and go."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_BLOCK = 2 << 20  # bytes that go together, as when weights are streamed
_BLOCKS = 16
_MOST_BLOCKS = 64
_ROUNDS = 12  # of which the quickest counts: neighbours take from the others


@dataclass(frozen=True)
class Paging:
    """Seconds per byte, measured. cached: from the page cache, beyond what memory takes. disk: from there."""

    cached: float
    disk: float


def measure_paging(folder: Path, threads: int, known: Path | None = None) -> Paging | None:
    """Measured on a file of 32 MiB that is written into the folder for a moment, by so many threads that share it: they
    hold each other up when pages come and go.

    known: a file that `cached` is measured on instead, if it is long enough: that depends on the pieces in which the
    page cache has it.
    None where it cannot be: the system has no such advice, or the folder no room.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or not hasattr(os, "posix_fadvise"):
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            for _ in range(_BLOCKS):
                file.write(os.urandom(_BLOCK))
            file.flush()
            os.fsync(file.fileno())
            if known is not None and (blocks := known.stat().st_size // _BLOCK) >= _BLOCKS:
                with open(known, "rb") as other:
                    cached = _cached(other.fileno(), min(blocks, _MOST_BLOCKS), threads)
            else:
                cached = _cached(file.fileno(), _BLOCKS, threads)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            started = time.perf_counter()
            while file.read(_BLOCK):
                pass
            return Paging(cached, (time.perf_counter() - started) / (_BLOCKS * _BLOCK))
    except OSError:
        return None


def _cached(file: int, count: int, threads: int) -> float:
    """The quickest round with pages that come and go, less the quickest with pages that stay."""
    mapped = mmap.mmap(file, count * _BLOCK, prot=mmap.PROT_READ)  # closed when nothing looks at it any more
    view = np.frombuffer(mapped, np.int64).reshape(count, -1)

    def read(blocks: range, forget: bool) -> None:
        for number in blocks:
            view[number].sum()
            if forget:
                mapped.madvise(mmap.MADV_DONTNEED, number * _BLOCK, _BLOCK)

    shares = [range(thread, count, threads) for thread in range(threads)]
    times: dict[bool, list[float]] = {False: [], True: []}
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            for forget, found in times.items():
                view.sum()  # all pages are there; what is read first is in no small cache
                if forget:
                    mapped.madvise(mmap.MADV_DONTNEED)
                started = time.perf_counter()
                list(pool.map(read, shares, [forget] * threads))
                found.append(time.perf_counter() - started)
    return max(0.0, min(times[True]) - min(times[False])) / (count * _BLOCK)
