"""The protocol of energy meters: joules since they were made, and how they were measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from edge.devices.kernel import load_text, whole

MeterKind = Literal["counter", "integrated", "estimate"]
"""counter: the device counts joules. integrated: it tells watts, summed over time. estimate: nothing is measured."""

Certainty = Literal["measured", "estimated"]

Scope = Literal["device", "package", "process"]


@dataclass(frozen=True, slots=True)
class Reading:
    """joules: since the meter was made. watts: now, None where only later readings tell. samples: distinct values
    that the sensor has shown, so that a stale gauge cannot claim precision."""

    joules: float
    watts: float | None
    source: str
    kind: MeterKind
    scope: Scope
    samples: int


def certainty(*kinds: str | None) -> Certainty:
    """Whether joules of these kinds of meter are measured, or some of them estimated, in the word that reports use."""
    return "estimated" if "estimate" in kinds else "measured"


class Unavailable(Exception):  # noqa: N818 - not an error: most devices have few sensors
    """Why a sensor cannot be read, now or any more."""


class Meter(Protocol):
    """`read` raises Unavailable once the sensor has vanished or no longer tells."""

    source: str
    kind: MeterKind
    scope: Scope

    def read(self) -> Reading: ...


def read_number(path: Path) -> int:
    """A number that the kernel shows in a file. Raises Unavailable."""
    try:
        number = whole(load_text(path))
    except PermissionError:
        raise Unavailable(f"{path} may be read by root only: sudo chmod a+r {path}") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'no path'})") from None
    if number is None:
        raise Unavailable(f"{path} cannot be read (no number)")
    return number
