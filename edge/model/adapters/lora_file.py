"""LoRA adapters as `--lora` names them, files and scales, without numpy, which `edge --help` does not need."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from edge.errors import InputError
from edge.records import dataclass

MAX_SCALE = 1e6


@dataclass(frozen=True)
class LoraFile:
    """An adapter file, and the factor that scales its change."""

    path: Path
    scale: float = 1.0

    def __str__(self) -> str:
        return f"{self.path}:{self.scale:g}" if self.scale != 1 else str(self.path)


Loras = tuple[LoraFile, ...]


def parse_lora(value: Any) -> Loras:
    """`FILE`, `FILE:0.5`, or several with commas between them; a Path is one file. Raises InputError."""
    if isinstance(value, LoraFile):
        return (_checked(value),)
    if isinstance(value, tuple) and all(isinstance(each, LoraFile) for each in value):
        return tuple(map(_checked, value))
    if isinstance(value, Path):
        return (_checked(LoraFile(value)),)
    if not isinstance(value, str) or not value:
        raise InputError(f"--lora takes an adapter's file, such as style.gguf or style.gguf:0.5, not {value!r:.60}")
    return tuple(_checked(_split(part)) for part in value.split(","))


def _split(text: str) -> LoraFile:
    path, colon, scale = text.rpartition(":")
    try:
        return LoraFile(Path(path), float(scale)) if colon and path else LoraFile(Path(text))
    except ValueError:  # the colon belongs to the name
        return LoraFile(Path(text))


def _checked(file: LoraFile) -> LoraFile:
    if not str(file.path) or file.path == Path():
        raise InputError("--lora names no file")
    if not math.isfinite(file.scale) or abs(file.scale) > MAX_SCALE:
        raise InputError(f"the scale of {file.path} must lie within ±{MAX_SCALE:g}, not be {file.scale:g}")
    return file


@dataclass(frozen=True)
class LoraSize:
    """The size of all adapters together."""

    rank: int = 0  # largest sum over a matrix
    nbytes: int = 0  # of all tensors, as in the files
