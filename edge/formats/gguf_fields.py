"""Bounded reads of a GGUF header's architecture fields."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.gguf import ArrayRef, GGUFFile
from edge.records import dataclass
from edge.values import brief

# Bounds on what a header may claim; generous for any model that could run on a device, tight enough that no
# product of two of them overflows what an engine multiplies.
LIMITS = {"layers": 512, "hidden": 1 << 17, "heads": 1024, "head_dim": 1024, "ffn": 1 << 20, "context": 1 << 27,
          "vocab": 1 << 20}  # fmt: skip


@dataclass(frozen=True)
class Header:
    """The architecture's fields of a file. A `key` has no architecture prefix: `attention.head_count`."""

    file: GGUFFile
    architecture: str

    def value(self, key: str) -> Any:
        """The unchecked value, None if absent. Raises UnsupportedError if it differs between layers."""
        name = f"{self.architecture}.{key}"
        value = self.file.metadata.get(name)
        if isinstance(value, ArrayRef):  # some architectures give one figure per layer
            if value.count > LIMITS["layers"]:
                raise ModelFormatError(f"{self.file.path}: {name} has {value.count} values: the file is damaged")
            distinct = np.unique(self.file.numbers(name))
            if distinct.size != 1:
                raise UnsupportedError(f"{self.file.path}: {name} differs from layer to layer: not supported yet")
            return distinct[0].item()
        return value

    def text(self, key: str, default: str) -> str:
        return str(self.file.metadata.get(f"{self.architecture}.{key}", default))

    def count(self, key: str, kind: str, default: int | None = None) -> int:
        """An integer from 1 to the limit for its kind. Raises ModelFormatError."""
        value = self.value(key)
        if value is None:
            value = default
        if value is None:
            raise ModelFormatError(f"{self.file.path}: {self.architecture}.{key} is missing")
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= LIMITS[kind]:
            raise ModelFormatError(
                f"{self.file.path}: {self.architecture}.{key} is {brief(value)}: it must be from 1 to {LIMITS[kind]}"
            )
        return value

    def positive(self, key: str, default: float, below: float) -> float:
        """A number between 0 and `below`. Raises ModelFormatError."""
        value = self.value(key)
        if value is None:
            return default
        if not isinstance(value, int | float) or not math.isfinite(value) or not 0 < value < below:
            raise ModelFormatError(
                f"{self.file.path}: {self.architecture}.{key} is {brief(value)}: it must lie between 0 and {below:g}"
            )
        return float(value)
