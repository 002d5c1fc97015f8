"""The machine that is measured on: what it is, how busy it is, how fast it reads."""

from __future__ import annotations

import os
import platform
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from edge.devices.memory import total_memory


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """What this is measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = set((fields.get("flags") or fields.get("Features", "")).split())
    interesting = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm", "sve")
    return {
        "cpu": fields.get("model name", platform.machine()),
        "family": f"{fields.get('cpu family', '?')}.{fields.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "isa": [flag for flag in interesting if flag in flags],
        "memory_gib": round(total_memory() / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "load_average": os.getloadavg()[0],
    }


def machine_ticks() -> int:
    """CPU time that the machine has spent on anything, and that a hypervisor took from it, in ticks."""
    user, nice, system, _idle, _iowait, *rest = map(int, Path("/proc/stat").read_text().splitlines()[0].split()[1:9])
    return user + nice + system + sum(rest)


def memory_bandwidth(threads: int) -> float:
    """Bytes per second that so many threads can read: the best of several passes over 256 MiB each."""
    arrays = [np.ones((256 << 20) // 4, np.int32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for read in (np.bitwise_or.reduce, np.maximum.reduce):  # at the speed of vector loads, without widening
            for _ in range(20):
                started = time.perf_counter()
                list(pool.map(read, arrays))
                best = max(best, sum(a.nbytes for a in arrays) / (time.perf_counter() - started))
    return best
