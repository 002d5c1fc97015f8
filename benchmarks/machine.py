"""The machine of a measurement: its name, its load, its memory bandwidth."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

from edge.devices.memory import total_memory
from edge.devices.probe import measure_ceilings
from edge.storage.cache import cache_folder


def files_folder() -> Path:
    """Where benchmarks keep the files that they make; made if it is not there."""
    folder = cache_folder() / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """The name and load of this machine."""
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


def memory_bandwidth(threads: int) -> float:
    """Bytes per second that this many threads can read, as `edge devices probe` measures it."""
    return measure_ceilings(threads).read_bytes_per_s
