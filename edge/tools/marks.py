"""Marks in streamed text, whichever way it is split into pieces."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(held: Sequence[object], mark: Sequence[object]) -> int:
    """Length of the longest suffix of `held` that is a proper prefix of `mark`."""
    longest = min(len(held), len(mark) - 1)
    return next((count for count in range(longest, 0, -1) if held[-count:] == mark[:count]), 0)
