"""Measurements in a file, one JSON line each behind a line of settings, so that an interrupted run can go on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from edge.devices.output import write_whole
from edge.devices.regular import read_regular
from edge.errors import InputError

T = TypeVar("T")


class Lines(Generic[T]):
    """`found`: what the file had, as `parse` makes it of JSON values; it raises what such code raises for wrong ones.

    path: None keeps nothing. Without `resume`, a file that is there is replaced. Raises InputError for a file that was
    made with other settings, has no measurements, or cannot be written.
    """

    def __init__(
        self, path: Path | None, settings: Mapping[str, Any], parse: Callable[[Any], T], *, resume: bool = False
    ) -> None:
        self._path = path
        self.found: list[T] = []
        if path is None:
            return
        settings = json.loads(json.dumps(settings))
        lines = _whole_lines(path) if resume and path.exists() else []
        if lines:
            _check_settings(path, lines[0], settings)
        for number, line in enumerate(lines[1:], start=2):
            try:
                self.found.append(parse(json.loads(line)))
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise InputError(f"{path}: line {number} is no measurement: leave out --resume to start anew") from None
        write_whole(path, "\n".join([json.dumps(settings), *lines[1:], ""]))  # without a last line that has no end

    def add(self, record: Mapping[str, Any]) -> None:
        """On disk before it returns. Raises InputError."""
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
    """A number, or lists of nothing else."""
    if isinstance(value, list):
        return all(are_numbers(each) for each in value)
    return isinstance(value, int | float)


def _whole_lines(path: Path) -> list[str]:
    """The last one is dropped if it has no end."""
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
