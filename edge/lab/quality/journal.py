"""A resumable file of measurements: a line of settings, then one JSON line per measurement."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from edge.devices.output import write_whole
from edge.devices.regular import read_regular
from edge.errors import InputError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


class Journal(Generic[K, T]):
    """Measurements by key. `parse` converts a line's record into a key and a measurement, and raises ValueError,
    TypeError, KeyError or AttributeError for an invalid one.

    path: None keeps nothing on disk. Without `resume`, an existing file is replaced. Raises InputError for a file with
    other settings or other content, or one that cannot be written.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], parse: Callable[[Any], tuple[K, T]], *, resume: bool
    ) -> None:
        self._path = path
        self._found: dict[K, T] = {}
        if path is None:
            return
        settings = json.loads(json.dumps(settings))
        lines = _whole_lines(path) if resume and path.exists() else []
        if lines:
            _check_settings(path, lines[0], settings)
        for number, line in enumerate(lines[1:], start=2):
            try:
                key, measured = parse(json.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise InputError(f"{path}: line {number} is no measurement: leave out --resume to start anew") from None
            self._found[key] = measured
        write_whole(path, "\n".join([json.dumps(settings), *lines[1:], ""]))  # drops a last line without an end

    def find(self, key: K) -> T | None:
        return self._found.get(key)

    def add(self, key: K, measured: T, record: Mapping[str, Any]) -> None:
        """Add a measurement; it is on disk when this returns. record: the input of `parse`. Raises InputError."""
        self._found[key] = measured
        if self._path is None:
            return
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(f"{self._path}: cannot be written ({error.strerror})") from None


def are_numbers(value: object) -> bool:
    """Whether a value is a number, or nested lists of numbers."""
    if isinstance(value, list):
        return all(map(are_numbers, value))
    return isinstance(value, int | float)


def _whole_lines(path: Path) -> list[str]:
    """All complete lines; a last one without a line end is dropped."""
    try:
        return [line[:-1] for line in read_regular(path).decode().splitlines(keepends=True) if line[-1] == "\n"]
    except (OSError, UnicodeDecodeError):
        raise InputError(f"{path}: cannot be read: leave out --resume to start anew") from None


def _check_settings(path: Path, line: str, settings: Mapping[str, Any]) -> None:
    try:
        stored = json.loads(line)
    except (ValueError, RecursionError):
        stored = None
    if not isinstance(stored, dict):
        raise InputError(f"{path}: no measurements of edge eval: leave out --resume to start anew")
    other = [name for name in {**settings, **stored} if stored.get(name) != settings.get(name)]
    if other:
        was, now = (json.dumps(each.get(other[0]))[:80] for each in (stored, settings))
        raise InputError(f"{path} was made with other settings ({other[0]}: {was}, now {now}): leave out --resume")
