"""The tensors of one quantized matrix, taken from those of a checkpoint."""

from __future__ import annotations

from edge.errors import ModelFormatError
from edge.formats.json_file import shown
from edge.formats.safetensors import Stored


class Parts:
    """The tensors of one matrix, which are taken from those of the checkpoint."""

    def __init__(self, tensors: dict[str, Stored], scale: str, stem: str) -> None:
        self._tensors, self.scale, self.stem = tensors, scale, stem
        self.path = tensors[scale].path

    def take(self, suffix: str, *types: str) -> Stored:
        """A part of one of these types, of any if none is named. Raises ModelFormatError if there is none."""
        name = self.stem + suffix
        if name not in self._tensors:
            raise ModelFormatError(f"{self.path}: {shown(name)} is missing")
        found = self._tensors.pop(name)
        if types and found.dtype not in types:
            raise ModelFormatError(
                f"{found.path}: {shown(name)} is of type {found.dtype} instead of {', '.join(types)}"
            )
        if 0 in found.shape:
            raise self.misfit(found)
        return found

    def maybe(self, suffix: str, *types: str) -> Stored | None:
        return self.take(suffix, *types) if self.has(suffix) else None

    def like(self, start: str) -> Stored:
        """The part whose suffix begins so."""
        start = self.stem + start
        return self.take(next((name for name in self._tensors if name.startswith(start)), start)[len(self.stem) :])

    def has(self, suffix: str) -> bool:
        return self.stem + suffix in self._tensors

    def misfit(self, part: Stored) -> ModelFormatError:
        return ModelFormatError(
            f"{part.path}: {shown(part.name)} has a shape {part.shape} that does not fit its matrix"
        )
