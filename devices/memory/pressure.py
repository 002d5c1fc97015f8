"""Memory pressure as the kernel reports it: cgroup limits, free memory, stalls.

Everything is read anew each time, below a root, since a process may move to another cgroup.
"""

from __future__ import annotations

import re
from pathlib import Path

from edge.devices.kernel import read_text, read_whole
from edge.devices.memory import cgroup_folders, free_memory
from edge.records import dataclass

_SOME = re.compile(r"some avg10=(\d{1,9}(?:\.\d{1,9})?)(?:\s|$)", re.ASCII)
_UNLIMITED = 1 << 60  # cgroup version 1 writes a larger number for no limit
_LIMITS = ("memory.max", "memory.high", "memory.limit_in_bytes")  # beyond `high`, processes are slowed down, not killed


@dataclass(frozen=True)
class Pressure:
    """Memory pressure; None: unknown."""

    limit: int | None  # bytes: the tightest cgroup limit above this process
    free: int | None  # bytes that the system can still provide
    stalled: float | None  # per cent of the last 10 s stalled on memory (PSI "some avg10"), system or cgroups


def read_pressure(root: Path = Path("/")) -> Pressure:
    """Read the present figures. Takes half a millisecond."""
    folders = cgroup_folders(root)
    shown = (read_whole(folder / name) for folder in folders for name in _LIMITS)
    limits = [limit for limit in shown if limit is not None and 0 <= limit < _UNLIMITED]
    stalls = [root / "proc/pressure/memory", *(folder / "memory.pressure" for folder in folders)]
    stalled = [share for path in stalls if (share := _some_avg10(read_text(path))) is not None]
    return Pressure(min(limits, default=None), free_memory(root), max(stalled, default=None))


def _some_avg10(text: str) -> float | None:
    """Parse avg10 from `some avg10=1.23 avg60=… avg300=… total=…`."""
    for line in text.splitlines():
        if match := _SOME.match(line):
            return float(match[1])
    return None
