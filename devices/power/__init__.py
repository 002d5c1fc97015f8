"""Energy meters of this device: its sensors, one file each, and an estimate where there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from edge.devices.power import battery, ina, macos, pmic, rapl
from edge.devices.power.base import Meter, Scope, Unavailable
from edge.devices.power.estimate import Estimate
from edge.devices.power.guarded import Guarded
from edge.devices.profiles import host_power
from edge.errors import InputError
from edge.records import dataclass

if TYPE_CHECKING:
    from edge.devices.power.nvml import Card


def _find_nvml(root: Path) -> Meter:
    from edge.devices.power import nvml

    return nvml.find(root)


# The best first: counters of energy before samplers of power, the whole device before a part of it.
_SENSORS: dict[str, Callable[[Path], Meter]] = {
    "ina": ina.find,
    "pmic": pmic.find,
    "rapl": rapl.find,
    "macos": macos.find,
    "battery": battery.find,
    "nvml": _find_nvml,
}
_FOR_CPUS = [name for name in _SENSORS if name != "nvml"]  # a graphics card's joules say nothing about a run on the CPU

ROOT_VARIABLE = "EDGE_SENSORS"  # a folder with the device's sys and proc: containers have them elsewhere


@dataclass(frozen=True)
class Sensor:
    """A power sensor."""

    name: str
    available: bool
    about: str  # its source, or why it is not available


def sensors_root() -> Path:
    """The folder that contains sys and proc. Raises InputError if EDGE_SENSORS names no folder."""
    stated = os.environ.get(ROOT_VARIABLE)
    if stated and not os.path.isdir(stated):
        raise InputError(f"{ROOT_VARIABLE} must name a folder with the device's sys and proc, not {stated!r}")
    return Path(stated or "/")


def memory_root() -> Path:
    """The root for reading memory and its limits: `sensors_root`, or the real root if that folder has no proc."""
    root = sensors_root()
    return root if (root / "proc").is_dir() else Path("/")


def sensors(root: Path | None = None) -> list[Sensor]:
    """All known sensors, including unavailable ones; the estimate comes last."""
    root, found = root or sensors_root(), []
    for name, find in _SENSORS.items():
        try:
            meter = find(root)
            found.append(Sensor(name, True, f"{meter.source}: {meter.kind}, the whole {meter.scope}"))
        except Unavailable as reason:
            found.append(Sensor(name, False, str(reason)))
    return [*found, Sensor("estimate", True, Estimate(host_power()).source)]


def find_meter(root: Path | None = None) -> Guarded:
    """The best meter of this device, counting from now; the estimate where there is no sensor, or once it fails."""
    root = root or sensors_root()
    estimate = Estimate(host_power())
    for name in _FOR_CPUS:
        try:
            return Guarded(_SENSORS[name](root), estimate)
        except Unavailable:
            continue
    return Guarded(estimate, estimate)


def measure_card(meter: object, card: Card) -> bool:
    """Switch the meter to the counter of the NVIDIA card that runs the model; the joules so far are kept. False if the
    card has no counter, or if the meter is an app's own, which continues."""
    from edge.devices.power import nvml

    if not isinstance(meter, Guarded) or meter.stated:
        return False
    try:
        meter.go_on_with(nvml.find(sensors_root(), card))
    except Unavailable:
        return False
    return True


def app_meter(joules: Callable[[], float], source: str = "app", scope: Scope = "device") -> Guarded:
    """A meter for `edge.load(meter=…)` that reads an app's own counter (see `AppCounter`), and the estimate once that
    fails.

    Raises InputError if the counter cannot be read now.
    """
    from edge.devices.power.app import AppCounter

    try:
        return Guarded(AppCounter(joules, source, scope), Estimate(host_power()), stated=True)
    except Unavailable as error:
        raise InputError(f"{error}: pass a function that returns joules") from None
