"""Reader of whisper.cpp's .bin files: figures, mel filters, the texts of tokens, then tensors up to the end.

The file is not trusted. Format: https://github.com/ggml-org/whisper.cpp, `models/convert-pt-to-ggml.py`; all numbers
are 32 bits:

    "ggml" │ 11 figures │ mels, bins, filters │ tokens: of each the length and the bytes of its text
    of each tensor: dimensions, length of the name, type │ extents, innermost first │ name │ data
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge.devices.regular import open_regular
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.arrays import open_packed, read_array
from edge.formats.blocks import BLOCK_TYPES, block_size, dequantize, nbytes
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

MAGIC = b"lmgg"  # 0x67676d6c
FIGURES = ("vocab", "positions", "hidden", "heads", "layers", "context", "text_hidden", "text_heads", "text_layers",
           "mels", "type")  # fmt: skip
_MOST_TOKENS, _MOST_TEXT, _MOST_NAME, _MOST_FILTERS = 1 << 18, 1 << 10, 1 << 8, 1 << 20


@dataclass(frozen=True)
class BinTensor:
    """A tensor of the file. shape: outermost first."""

    path: Path
    name: str
    dtype: str  # a block type
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> FloatArray | AnyArray:
        """The values, float32 or float16, in the tensor's shape. Raises ModelFormatError."""
        with open_regular(self.path) as file:
            file.seek(self.offset)
            data = read_array(file, np.uint8, self.nbytes)
        if data.size != self.nbytes:
            raise ModelFormatError(f"{self.path}: the file became shorter while it was read")
        if self.dtype == "F16":
            return data.view(np.float16).reshape(self.shape)
        return dequantize(data.reshape(prod(self.shape[:-1]), -1), self.dtype).reshape(self.shape)


@dataclass(frozen=True)
class WhisperBin:
    """An opened file. tokens: the texts of the vocabulary's first tokens; converters leave out control tokens."""

    figures: dict[str, int]
    tokens: list[bytes]
    tensors: dict[str, BinTensor]


def is_whisper_bin(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            return file.read(4) == MAGIC
    except OSError:
        return False


def read_whisper_bin(path: Path) -> WhisperBin:
    """Open a file. Raises ModelFormatError, UnsupportedError for a type that edge does not read."""
    with open_packed(path) as file:
        return _read(file, path)


def _read(file: BinaryIO, path: Path) -> WhisperBin:
    size = file.seek(0, 2)
    file.seek(4)
    figures = dict(zip(FIGURES, _numbers(file, len(FIGURES)), strict=True))
    mels, bins = _numbers(file, 2)
    if not 0 <= mels * bins <= _MOST_FILTERS:
        raise ModelFormatError(f"{path}: it claims {mels} × {bins} mel filters: the file is damaged")
    file.seek(4 * mels * bins, 1)
    (count,), tokens = _numbers(file, 1), list[bytes]()
    if not 0 <= count <= _MOST_TOKENS:
        raise ModelFormatError(f"{path}: it claims {count} tokens: the file is damaged")
    for _ in range(count):
        (length,) = _numbers(file, 1)
        if not 0 <= length <= _MOST_TEXT:
            raise ModelFormatError(f"{path}: a token claims {length} bytes: the file is damaged")
        tokens.append(file.read(length))
    tensors: dict[str, BinTensor] = {}
    while file.tell() < size:
        rank, length, code = _numbers(file, 3)
        if not 1 <= rank <= 4 or not 0 < length <= _MOST_NAME:
            raise ModelFormatError(f"{path}: a tensor after {len(tensors)} others is damaged")
        shape = tuple(reversed(_numbers(file, rank)))
        name = file.read(length).decode()
        if code not in BLOCK_TYPES:
            raise UnsupportedError(f"{path}: {name!r} has the unknown type {code}")
        dtype, elements = BLOCK_TYPES[code].name, prod(shape)
        if min(shape) < 1 or shape[-1] % block_size(dtype) or file.tell() + nbytes(dtype, elements) > size:
            raise ModelFormatError(f"{path}: {name!r} has the impossible shape {shape}, or the file is truncated")
        tensors[name] = BinTensor(path, name, dtype, shape, file.tell(), nbytes(dtype, elements))
        file.seek(tensors[name].nbytes, 1)
    return WhisperBin(figures, tokens, tensors)


def _numbers(file: BinaryIO, count: int) -> tuple[int, ...]:
    return struct.unpack(f"<{count}i", file.read(4 * count))
