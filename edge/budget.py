"""Parser of budgets: `"256MiB"`, `"20s"`, `"30J"` … to bytes, seconds, joules, watts and °C.

Text states its unit, except for large numbers of bytes; a number is in the base unit.
"""

from __future__ import annotations

import math
import re

from edge.errors import InputError
from edge.records import dataclass

_QUANTITY = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z°]*)\s*", re.ASCII)


@dataclass(frozen=True)
class Quantity:
    """units: their factors, by names. what, example: for errors."""

    what: str
    example: str
    units: dict[str, float]


# Memory keeps to the two standards: KiB is 1024 bytes, kB is 1000. A bare K/M/G means KiB/MiB/GiB, as in Docker.
_BYTES: dict[str, float] = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _BYTES |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}

_FEWEST_BARE = 1 << 16  # a smaller number without a unit is meant in MiB: no cache or process has so few bytes

MEMORY = Quantity("memory", "256MiB", _BYTES)
TIME = Quantity("time", "20s", {"s": 1.0, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0})
ENERGY = Quantity("energy", "30J", {"j": 1.0, "mj": 1e-3, "kj": 1e3, "wh": 3600.0, "mwh": 3.6, "MJ": 1e6, "MWh": 3.6e9})
POWER = Quantity("power", "3W", {"w": 1.0, "mw": 1e-3, "MW": 1e6})
TEMPERATURE = Quantity("temperature", "70C", {"c": 1.0, "°c": 1.0})


def _parse(value: str | float, of: Quantity, what: str) -> float:
    """Parse an amount. Text needs a unit, unless the quantity has one without a name; a number is in the base unit."""
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        raise InputError(f"{what} is too large") from None
    units, example = of.units if isinstance(value, str) else {**of.units, "": 1}, of.example
    match = _QUANTITY.fullmatch(text)
    unit = None if match is None else units.get(match[2], units.get(match[2].lower()))  # MJ are no mJ
    if match is not None and not match[2] and unit is None:
        raise InputError(f"{what} {text.strip()} has no unit: write it like {example}")
    if match is None or unit is None:
        raise InputError(f"{what} {text!r} is not understood: write it like {example}")
    amount = float(match[1]) * unit
    if not math.isfinite(amount):
        raise InputError(f"{what} {text!r} is too large")
    if amount <= 0:
        raise InputError(f"{what} {text!r} must be greater than zero")
    return amount


def parse_bytes(value: str | int, what: str = MEMORY.what) -> int:
    """Parse `"256MiB"`, `"1.5GiB"`, `"300MB"`, `"512M"` or a number of bytes.

    Raises InputError if it is not a positive amount of memory, or a number too small to be meant as bytes without a
    unit.
    """
    count = int(_parse(value, MEMORY, what))
    if 0 < count < _FEWEST_BARE and not str(value).rstrip()[-1].isalpha():
        raise InputError(f"{what} {count} is a number of bytes: did you mean {count}MiB?")
    if count == 0:
        raise InputError(f"{what} {value!r} must be greater than zero")
    return count


def parse_seconds(value: str | float, what: str = TIME.what) -> float:
    """Parse `"20s"`, `"1.5m"`, `"2h"`, `"500ms"` or a number of seconds. Raises InputError."""
    return _parse(value, TIME, what)


def parse_joules(value: str | float, what: str = ENERGY.what) -> float:
    """Parse `"30J"`, `"500mJ"`, `"0.1Wh"` or a number of joules. Raises InputError."""
    return _parse(value, ENERGY, what)


def parse_watts(value: str | float, what: str = POWER.what) -> float:
    """Parse `"3W"`, `"800mW"` or a number of watts. Raises InputError."""
    return _parse(value, POWER, what)


def parse_celsius(value: str | float, what: str = TEMPERATURE.what) -> float:
    """Parse `"70C"` or a number of degrees Celsius. Raises InputError."""
    return _parse(value, TEMPERATURE, what)


def format_bytes(count: float) -> str:
    """Format bytes: 268435456 -> `256 MiB`. One decimal below 10."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"


def format_joules(joules: float) -> str:
    """Format joules with three digits, for single tokens: 1.5 -> `1.5 J`, 0.0123 -> `12.3 mJ`; more for thousands."""
    if joules < 0.9995:
        return f"{joules * 1e3:.3g} mJ"
    return f"{joules:.3g} J" if joules < 999.5 else f"{joules:.0f} J"
