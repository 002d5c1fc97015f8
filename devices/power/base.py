"""The protocol of energy meters: joules since their construction, and how they were measured."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

from edge.devices.kernel import load_text, whole
from edge.records import dataclass

MeterKind = Literal["counter", "integrated", "estimate"]
"""counter: the device counts joules. integrated: watts, integrated over time. estimate: nothing is measured."""

Certainty = Literal["measured", "estimated"]

Scope = Literal["device", "package", "process"]


@dataclass(frozen=True)
class Reading:
    """A reading of an energy meter."""

    joules: float  # since the meter was made
    watts: float | None  # now; None if only the difference of readings shows them
    source: str
    kind: MeterKind
    scope: Scope
    samples: int  # distinct values of the sensor: a stale gauge has few, and cannot claim precision


def certainty(*kinds: str | None) -> Certainty:
    """The report's word for joules of these kinds of meter: measured, or estimated if one of them is."""
    return "estimated" if "estimate" in kinds else "measured"


class Unavailable(Exception):  # noqa: N818 - not an error: most devices have few sensors
    """A sensor that cannot be read; the message says why."""


class Meter(Protocol):
    """An energy meter. `read` raises Unavailable if the sensor has vanished or fails."""

    source: str
    kind: MeterKind
    scope: Scope

    def read(self) -> Reading: ...


def read_number(path: Path) -> int:
    """Read a number from a kernel file. Raises Unavailable."""
    try:
        number = whole(load_text(path))
    except PermissionError:
        raise Unavailable(f"{path} may be read by root only: sudo chmod a+r {path}") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'no path'})") from None
    if number is None:
        raise Unavailable(f"{path} cannot be read (no number)")
    return number
