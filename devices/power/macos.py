"""Apple's energy counters, by the package zeus-apple-silicon: joules of the processor's parts."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from edge.devices.power.base import MeterKind, Reading, Scope, Unavailable

_MILLI = 1e-3
_PARTS = ("cpu_total_mj", "dram_mj", "gpu_mj", "ane_mj")


class AppleSilicon:
    """A meter over the library's measuring windows, which end when they are read: each reading opens the next."""

    source = "Apple energy counters"
    kind: MeterKind = "counter"
    scope: Scope = "package"

    def __init__(self, monitor: Any) -> None:
        self._monitor = monitor
        self._joules, self._samples = 0.0, 0
        monitor.begin_window("edge")

    def read(self) -> Reading:
        window = self._monitor.end_window("edge")
        self._monitor.begin_window("edge")
        spent = sum(getattr(window, part, None) or 0 for part in _PARTS) * _MILLI
        self._joules += spent
        self._samples += spent > 0
        return Reading(self._joules, None, self.source, self.kind, self.scope, self._samples)


def find(_root: Path) -> AppleSilicon:
    """The meter of this Mac. Raises Unavailable on other systems, or without the package."""
    if platform.system() != "Darwin":
        raise Unavailable("not macOS")
    try:
        from zeus_apple_silicon import AppleEnergyMonitor
    except ImportError:
        raise Unavailable("the package zeus-apple-silicon is not installed") from None
    return AppleSilicon(AppleEnergyMonitor())
