"""The battery's own gauge: power of the whole device while it is not plugged in.

https://docs.kernel.org/power/power_supply_class.html: µW, µA and µV. The current's sign differs by maker.
"""

from __future__ import annotations

from pathlib import Path

from edge.devices.kernel import read_text
from edge.devices.power.base import Unavailable, read_number
from edge.devices.power.integrate import Integrated

_MICRO = 1e-6


def find(root: Path) -> Integrated:
    """The meter of all batteries. Raises Unavailable if there is none, or if one is being charged or full."""
    supplies = sorted((root / "sys/class/power_supply").glob("*"))
    batteries = [path for path in supplies if read_text(path / "type") == "Battery"]
    batteries = [path for path in batteries if read_text(path / "scope") != "Device"]  # a mouse's, for example
    if not batteries:
        raise Unavailable("no battery in /sys/class/power_supply")
    return Integrated("battery", "device", lambda: sum(map(_watts, batteries)))


def _watts(battery: Path) -> float:
    status = read_text(battery / "status")
    if status in ("Charging", "Full", "Not charging"):
        raise Unavailable(f"the battery is {status.lower()}: its gauge does not show what the device draws")
    if (battery / "power_now").is_file():
        return abs(read_number(battery / "power_now")) * _MICRO
    return abs(read_number(battery / "current_now")) * _MICRO * read_number(battery / "voltage_now") * _MICRO
