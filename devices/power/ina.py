"""INA3221 and INA226 current monitors, as on Jetson boards: the input rail, which feeds the whole board.

https://docs.kernel.org/hwmon/ina3221.html: mV and mA; https://docs.kernel.org/hwmon/ina2xx.html: µW.
"""

from __future__ import annotations

from pathlib import Path

from edge.devices.kernel import read_text
from edge.devices.power.base import Unavailable, read_number
from edge.devices.power.integrate import Integrated

_INPUTS = ("VDD_IN", "VIN_SYS_5V0", "POM_5V_IN")  # rails that feed all others, by their names on Jetson boards
_MILLI, _MICRO = 1e-3, 1e-6


def find(root: Path) -> Integrated:
    """The meter of the input rail. Raises Unavailable if no monitor of it is known."""
    monitors = sorted((root / "sys/class/hwmon").glob("hwmon*"))
    rails = [
        (monitor, label.name[2:-6])
        for monitor in monitors
        if read_text(monitor / "name") == "ina3221"
        for label in sorted(monitor.glob("in*_label"))
        if read_text(label) in _INPUTS
    ]
    if rails:
        return Integrated("INA3221", "device", lambda: sum(_product(*rail) for rail in rails))
    whole = [monitor for monitor in monitors if read_text(monitor / "name") in ("ina226", "ina219", "ina231")]
    if len(whole) == 1:  # of several, it is unknown which one feeds the others
        return Integrated("INA226", "device", lambda: read_number(whole[0] / "power1_input") * _MICRO)
    raise Unavailable("no INA3221 or INA226 monitor of the input rail in /sys/class/hwmon")


def _product(monitor: Path, channel: str) -> float:
    volts, amperes = (read_number(monitor / f"{kind}{channel}_input") * _MILLI for kind in ("in", "curr"))
    return volts * amperes
