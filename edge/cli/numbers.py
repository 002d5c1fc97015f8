"""`0,4096` as numbers."""

from __future__ import annotations

from edge.errors import InputError


def parse_numbers(flag: str, text: str, least: int = 0) -> list[int]:
    """Each once, in their order. Raises InputError for what is no number, or below `least`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 and int(part) >= least for part in parts):
        raise InputError(f"{flag} takes numbers separated by commas, {least} at least, such as 512,4096, not {text!r}")
    return list(dict.fromkeys(int(part) for part in parts))
