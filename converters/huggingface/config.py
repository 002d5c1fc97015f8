"""Bounded reads of the values of a `config.json`, some of which old and new files name differently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf_fields import LIMITS
from edge.formats.json_file import read_object
from edge.values import brief

_LEAST, _MOST = 2.0**-126, 2.0**127  # GGUF keeps float32


@dataclass(frozen=True)
class Config:
    """A `config.json`, or its part for the text model. Errors name the file."""

    path: Path
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """The unchecked value; null counts as absent."""
        value = self.values.get(key)
        return default if value is None else value

    def count(self, key: str, kind: str, default: int | None = None) -> int:
        """An integer from 1 to the limit of its kind. Raises ModelFormatError."""
        value = self.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.path}: {key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LIMITS[kind]:
            raise ModelFormatError(f"{self.path}: {key} is {brief(value)}: it must be from 1 to {LIMITS[kind]}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above 0. Raises ModelFormatError."""
        value = self.get(key, default)
        if value is None:
            raise ModelFormatError(f"{self.path}: {key} is missing")
        try:
            number = math.nan if isinstance(value, bool | str) else float(value)
        except (TypeError, OverflowError):
            number = math.nan
        if not _LEAST <= number <= _MOST:
            raise ModelFormatError(f"{self.path}: {key} is {brief(value)}: it must be a number above 0")
        return number

    def must_be(self, key: str, *allowed: Any) -> None:
        """Raise UnsupportedError for a setting that GGUF has no field for; absent and null are allowed."""
        value = self.get(key)
        if value is not None and value not in allowed:
            raise UnsupportedError(f"{self.path}: {key} is {brief(value)}, which is not supported")

    def part(self, key: str) -> Config | None:
        """A nested object; its errors name the same file. Raises ModelFormatError."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise ModelFormatError(f"{self.path}: {key} is {brief(value)} instead of an object")
        return Config(self.path, value)


def read_config(folder: Path) -> Config:
    """Read a folder's config.json. Raises InputError if there is none, ModelFormatError."""
    if not folder.is_dir():
        raise InputError(f"{folder}: " + ("not a folder" if folder.exists() else "no such folder"))
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(f"{folder}: there is no config.json in it: not a Hugging Face model")
    return Config(path, read_object(path))
