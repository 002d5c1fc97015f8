"""The share of this device's cores that other programs use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edge.devices.host import granted_share, logical_cores
from edge.devices.kernel import read_text, whole
from edge.devices.keys import blake2b

DISTURBED = 0.1  # share of the cores used by other processes that disturbs a measurement
_PROBE_S = 0.2 if sys.platform == "win32" else 0.1  # several time slices of each program; Windows counts 16 ms at once
_BUSY = (0, 1, 2, 5, 6, 7)  # user, nice, system, interrupts; and stolen: used by other guests of the same machine


@dataclass(frozen=True)
class Load:
    """Core-seconds since the system started."""

    busy: float
    total: float


def read_load(root: Path = Path("/")) -> Load | None:
    """The load so far; None if the system does not say."""
    name, *counts = read_text(root / "proc/stat").partition("\n")[0].split() or [""]
    ticks = [tick for tick in map(whole, counts) if tick is not None]
    if name != "cpu" or len(ticks) < 8 or not hasattr(os, "sysconf"):  # Windows has none
        return None
    second = os.sysconf("SC_CLK_TCK")
    return Load(sum(ticks[each] for each in _BUSY) / second, sum(ticks[:8]) / second)


def others_from_now(own: Callable[[], float] = time.process_time) -> Callable[[], float | None]:
    """Return a function that gives other processes' share (0 to 1) of all cores' time since this call.

    own: core-seconds so far that count as ours.
    """
    before, spent = read_load(), own()
    return lambda: share_of_others(before, read_load(), own() - spent)


def share_of_others(before: Load | None, after: Load | None, own: float) -> float | None:
    """Other processes' share (0 to 1) of the core-seconds between two readings. own: core-seconds of this process."""
    if before is None or after is None or after.total <= before.total:
        return None
    return min(1.0, max(0.0, (after.busy - before.busy - own) / (after.total - before.total)))


def neighbours() -> float:
    """The threads of other programs, on average, that want this process's cores now, measured: threads that never
    sleep, one on each core, get cores / (cores + neighbours) of the time that cgroups grant. 0 if others use little."""
    from concurrent.futures import ThreadPoolExecutor  # here: a plan counts what it has imported

    cores, share = logical_cores(), granted_share()
    with ThreadPoolExecutor(cores) as pool:
        granted = sum(pool.map(_granted, [_PROBE_S] * cores)) / cores / share
    return 0.0 if granted > 1 - DISTURBED else cores / max(granted, 1e-3) - cores


def _granted(seconds: float) -> float:
    """The share of the time that a busy thread gets of a core."""
    work = bytes(1 << 22)  # hashed without Python's lock
    began, worked = time.perf_counter(), time.thread_time()
    while time.perf_counter() < began + seconds:
        blake2b(work)
    return (time.thread_time() - worked) / (time.perf_counter() - began)
