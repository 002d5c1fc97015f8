"""Fields of bodies: their descriptions and ranges, beside their types."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from edge.records import dataclass
from edge.values import Rule


@dataclass(frozen=True)
class Range(Rule):
    """A number from `low` to `high`."""

    low: float = 0
    high: float = 0


def whole(low: int, high: int) -> Range:
    """The rule for a whole number from `low` to `high`."""
    return Range(f"a whole number from {low} to {high}", lambda value: low <= value <= high, low, high)


def within(low: float, high: float) -> Range:
    """The rule for a number from `low` to `high`."""
    return Range(f"a number from {low} to {high}", lambda value: low <= value <= high, low, high)


def said(help: str, default: Any = None) -> Any:
    """A field with its description."""
    return field(default=default, metadata={"help": help})
