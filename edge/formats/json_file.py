"""Bounded reading of foreign JSON files, with one-line errors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from edge.devices.regular import check_file, read_bounded
from edge.errors import InputError, ModelFormatError
from edge.values import brief

_MOST_BYTES = 256 << 20  # the largest tokenizer.json have 35 MB
_MOST_GIVEN = 64 << 20


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises ModelFormatError."""
    return parse_object(_read(path), str(path))


def read_list(path: Path) -> list[Any]:
    """Read a JSON file that holds a list. Raises ModelFormatError."""
    return items(path, parse_object(b'{"list": %b}' % _read(path), str(path)), "list")


def read_given(path: Path, what: str) -> Any:
    """Read a user's JSON file, which errors call `what`. Raises InputError."""
    try:
        check_file(path)
        if path.stat().st_size > _MOST_GIVEN:
            raise InputError(f"{path} is larger than {_MOST_GIVEN >> 20} MiB: that is no {what}")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise InputError(f"{path}: not JSON, so no {what}") from None


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys. Raises ModelFormatError that starts with `where`."""
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


def _read(path: Path) -> bytes:
    return read_bounded(path, _MOST_BYTES, "JSON of a model: the file is damaged", ModelFormatError)


def items(path: Path, said: Mapping[str, Any], key: str) -> list[Any]:
    """The list under a key, empty if absent. Raises ModelFormatError if it is something else."""
    value = said.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise ModelFormatError(f"{path}: {key} is {brief(value)} instead of a list")
    return value


def shown(name: str) -> str:
    """A name from a file, for an error message: shortened only if absurdly long."""
    return repr(name if len(name) <= 120 else f"{name[:60]}…{name[-60:]}")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    pairs = list(pairs)
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found
