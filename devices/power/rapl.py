"""Intel's and AMD's energy counters (RAPL): joules of the processor packages.

https://docs.kernel.org/power/powercap/powercap.html. Since 2020 only root may read them (CVE-2020-8694).
"""

from __future__ import annotations

from pathlib import Path

from edge.devices.power.base import MeterKind, Reading, Scope, Unavailable, read_number
from edge.records import dataclass

_MICRO = 1e-6


@dataclass
class _Package:
    counter: Path
    range: int  # after which the counter starts again at 0
    last: int


class Rapl:
    """Sum of the packages' counters. Those of cores and memory controllers are parts of them."""

    source = "RAPL"
    kind: MeterKind = "counter"
    scope: Scope = "package"

    def __init__(self, packages: list[_Package]) -> None:
        self._packages = packages
        self._spent = 0
        self._samples = 0

    def read(self) -> Reading:
        before = self._spent
        for package in self._packages:
            now = read_number(package.counter)
            self._spent += now - package.last + (package.range + 1 if now < package.last else 0)
            package.last = now
        self._samples += self._spent != before
        return Reading(self._spent * _MICRO, None, self.source, self.kind, self.scope, self._samples)


def find(root: Path) -> Rapl:
    """The meter of all packages. Raises Unavailable if there is none, or if its counter cannot be read."""
    zones = [path for path in sorted((root / "sys/class/powercap").glob("intel-rapl:*")) if path.name.count(":") == 1]
    if not zones:
        raise Unavailable("no /sys/class/powercap/intel-rapl:*: not an Intel or AMD processor, or a virtual machine")
    return Rapl(
        [
            _Package(zone / "energy_uj", read_number(zone / "max_energy_range_uj"), read_number(zone / "energy_uj"))
            for zone in zones
        ]
    )
