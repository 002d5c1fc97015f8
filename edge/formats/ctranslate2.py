"""Reader of CTranslate2's model.bin: a list of named tensors, then names that stand for others.

The file is not trusted: names, shapes and sizes must agree with each other and with the file.
Format: https://github.com/OpenNMT/CTranslate2, `python/ctranslate2/specs/model_spec.py`, binary version 6:

    u32 6 │ string: the kind of model │ u32 its revision │ u32 tensors
    of each: string name │ u8 dimensions │ u32 extents │ u8 type │ u32 bytes │ the bytes
    u32 other names │ of each: string │ string: the tensor

A string is a u16 length, and bytes that end with a zero.
"""

from __future__ import annotations

import struct
from math import prod
from pathlib import Path
from typing import BinaryIO

from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.arrays import open_packed
from edge.formats.safetensors import Stored

_VERSION = 6
_TYPES = {0: ("F32", 4), 1: ("I8", 1), 2: ("I16", 2), 3: ("I32", 4), 4: ("F16", 2), 5: ("BF16", 2)}
_MOST = 1 << 14  # tensors
_MOST_DIMENSIONS = 4


def read_model_bin(path: Path) -> tuple[str, dict[str, Stored]]:
    """The kind of model, such as WhisperSpec, and all tensors by name. Raises ModelFormatError, UnsupportedError."""
    with open_packed(path) as file:
        return _read(file, path)


def _read(file: BinaryIO, path: Path) -> tuple[str, dict[str, Stored]]:
    size = file.seek(0, 2)
    file.seek(0)
    version = _number(file)
    if version != _VERSION:
        raise UnsupportedError(f"{path}: version {version} of CTranslate2's files: edge reads version {_VERSION}")
    kind, _revision, count = _string(file), _number(file), _number(file)
    if count > _MOST:
        raise ModelFormatError(f"{path}: it claims {count} tensors: the file is damaged")
    found: dict[str, Stored] = {}
    for _ in range(count):
        name, (rank,) = _string(file), struct.unpack("<B", file.read(1))
        if rank > _MOST_DIMENSIONS:
            raise ModelFormatError(f"{path}: {name[:80]!r} claims {rank} dimensions: the file is damaged")
        shape = tuple(_number(file) for _ in range(rank))
        (code,), nbytes, start = struct.unpack("<B", file.read(1)), _number(file), file.tell()
        dtype, width = _TYPES.get(code, ("", 0))
        if name in found or nbytes != width * prod(shape) or start + nbytes > size:
            raise ModelFormatError(f"{path}: {name[:80]!r} has a shape, type or size that do not fit each other")
        found[name] = Stored(path, name, dtype, shape, start, nbytes)
        file.seek(nbytes, 1)
    aliases = _number(file)
    if aliases > _MOST:
        raise ModelFormatError(f"{path}: it claims {aliases} names of tensors: the file is damaged")
    for _ in range(aliases):
        alias, name = _string(file), _string(file)
        if name in found:
            found[alias] = found[name]
    return kind, found


def _number(file: BinaryIO) -> int:
    number: int = struct.unpack("<I", file.read(4))[0]
    return number


def _string(file: BinaryIO) -> str:
    (length,) = struct.unpack("<H", file.read(2))
    data = file.read(length)
    if len(data) != length or not data.endswith(b"\0"):
        raise struct.error
    return data[:-1].decode()
