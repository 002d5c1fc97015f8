"""Temperature and clock throttling of this device, from the kernel's files."""

from __future__ import annotations

import math
from pathlib import Path

from edge.devices.kernel import read_text, read_whole
from edge.records import dataclass

_MILLI = 1e-3
_ROOT = Path("/")
_PROCESSOR = ("cpu", "x86_pkg", "soc", "package", "tdie", "coretemp", "k10temp", "acpitz")


@dataclass(frozen=True)
class Zone:
    """A thermal zone."""

    name: str
    path: Path
    celsius: float  # now
    trip: float | None  # where the kernel starts to throttle; None if it does not say


def zones(root: Path = _ROOT) -> list[Zone]:
    """All readable zones, the processor's first."""
    found = []
    for path in sorted((root / "sys/class/thermal").glob("thermal_zone*")):
        if (celsius := read_celsius(path / "temp")) is not None:
            found.append(Zone(read_text(path / "type"), path / "temp", celsius, _trip(path)))
    for monitor in sorted((root / "sys/class/hwmon").glob("hwmon*")):
        name = read_text(monitor / "name")
        if name in _PROCESSOR and (celsius := read_celsius(monitor / "temp1_input")) is not None:
            found.append(Zone(name, monitor / "temp1_input", celsius, None))
    return sorted(found, key=lambda zone: not zone.name.lower().startswith(_PROCESSOR))


def read_celsius(path: Path) -> float | None:
    """A sensor's temperature; None if it has vanished or shows an impossible value."""
    milli = read_whole(path)
    return milli * _MILLI if milli is not None and -40 < milli * _MILLI < 150 else None


def held_back(root: Path = _ROOT) -> float | None:
    """The first core's present clock limit as a fraction of its highest clock; None where the system does not say."""
    folder = root / "sys/devices/system/cpu/cpu0/cpufreq"
    now, most = read_whole(folder / "scaling_max_freq"), read_whole(folder / "cpuinfo_max_freq")
    return now / most if now and most and now > 0 and most > 0 else None


def read_hertz(root: Path = _ROOT) -> float | None:
    """The clock of the fastest core now, in Hz; None where the system does not say."""
    shown = map(read_whole, (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"))
    clocks = [kilo * 1e3 for kilo in shown if kilo is not None and kilo > 0]
    if not clocks:
        lines = read_text(root / "proc/cpuinfo").splitlines()
        mega = [_number(line.partition(":")[2]) for line in lines if line.startswith("cpu MHz")]
        clocks = [each * 1e6 for each in mega if each > 0]
    return max(clocks, default=None)


def _number(text: str) -> float:
    """Parse a number; 0 for anything else, or if it is not finite."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) else 0.0


def _trip(zone: Path) -> float | None:
    passive = [
        read_celsius(kind.with_name(kind.name.replace("_type", "_temp")))
        for kind in zone.glob("trip_point_*_type")
        if read_text(kind) == "passive"
    ]
    return min((each for each in passive if each is not None), default=None)
