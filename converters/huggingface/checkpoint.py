"""The weights of a Hugging Face folder: one safetensors file, or several with an index."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.json_file import read_object, shown
from edge.formats.safetensors import Stored, read_header
from edge.types import AnyArray, FloatArray


@dataclass
class Loss:
    """The squared error of matrices that became blocks, and the squares of their values."""

    error: float = 0.0
    square: float = 0.0

    def add(self, values: FloatArray, kept: FloatArray) -> None:
        missed, exact = (kept - values).ravel(), values.ravel()
        self.error += float(np.dot(missed, missed))
        self.square += float(np.dot(exact, exact))

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.error + other.error, self.square + other.square)

    @property
    def relative(self) -> float:
        """The root mean square of the error, as a share of that of the values; 0: none."""
        return sqrt(self.error / self.square) if self.square else 0.0


class Kept(NamedTuple):
    """A quantized matrix in blocks."""

    data: AnyArray  # uint8 [..., rows, bytes of a row]
    loss: Loss


class CheckpointTensor(Protocol):
    """A tensor of a checkpoint."""

    @property
    def path(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    def read(self) -> AnyArray: ...


@runtime_checkable
class BlockTensor(CheckpointTensor, Protocol):
    """A tensor that blocks of GGUF can keep."""

    @property
    def format(self) -> str: ...  # of the checkpoint, for people
    @property
    def block_type(self) -> str | None: ...
    def read_blocks(self) -> Kept: ...


_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def read_checkpoint(folder: Path) -> dict[str, Stored]:
    """All tensors of the folder, by name; only headers are read. Raises InputError, ModelFormatError."""
    if (folder / _INDEX).is_file():
        return _from_index(folder)
    if (folder / _WHOLE).is_file():
        return read_header(folder / _WHOLE)
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        raise UnsupportedError(f"{folder}: its weights are Python pickles, that is programs: save them as safetensors")
    raise InputError(f"{folder}: there is no {_WHOLE} in it")


def _from_index(folder: Path) -> dict[str, Stored]:
    index = folder / _INDEX
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ModelFormatError(f"{index}: it has no weight_map from tensors to files")
    shards: dict[str, dict[str, Stored]] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelFormatError(f"{index}: {shown(name)} is not the name of a safetensors file in this folder")
        if not (folder / name).is_file():
            raise ModelFormatError(f"{folder}: {name} is missing, though {_INDEX} names it")
        shards[name] = read_header(folder / name)
    found = {}
    for tensor, name in places.items():
        if tensor not in shards[name]:
            raise ModelFormatError(f"{folder / name}: {shown(tensor)} is missing, though {_INDEX} places it there")
        found[tensor] = shards[name][tensor]
    return found
