"""JSON files of other people: bounded, and refused in one line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edge.errors import ModelFormatError

_MOST_BYTES = 256 << 20  # the largest tokenizer.json have 35 MB


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelFormatError."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ModelFormatError(f"{path}: larger than {_MOST_BYTES >> 20} MiB: the file is damaged")
        data = path.read_bytes()
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_object(data, str(path))


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """JSON text with an object in it, without the same key twice. Raises ModelFormatError that starts with `where`."""
    try:
        said = json.loads(data.decode("utf-8"), object_pairs_hook=_unique)
    except UnicodeDecodeError:
        raise ModelFormatError(f"{where}: it is no UTF-8 text: the file is damaged") from None
    except RecursionError:
        raise ModelFormatError(f"{where}: too many brackets within each other: the file is damaged") from None
    except ValueError as error:
        raise ModelFormatError(f"{where}: it is no JSON ({error})") from None
    if not isinstance(said, dict):
        raise ModelFormatError(f"{where}: there is no JSON object in it")
    return said


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
