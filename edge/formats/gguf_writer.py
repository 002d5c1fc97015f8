"""Writer of GGUF files, tensor by tensor: memory holds one at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

import numpy as np

from edge.devices.output import check_file, new_file
from edge.errors import InputError, ModelFormatError
from edge.formats.blocks import TYPE_IDS, nbytes
from edge.formats.gguf import GGUFFile, TensorInfo, read_gguf
from edge.types import AnyArray

Field = bytes | bool | str | np.generic | AnyArray | list[str]
"""A header value. A number's NumPy dtype determines its type; bytes are an encoded type and value of another file."""

_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_NOTHING = np.zeros(0, np.uint8)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {"uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6, "bool": 7,
            "uint64": 10, "int64": 11, "float64": 12}  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]  # in GGUF's order, innermost first
    type: str

    @property
    def values(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return nbytes(self.type, self.values)


def check_gguf(path: Path, *, force: bool) -> None:
    """Raise InputError unless a GGUF file may be written there. force: it may replace an older one, but no other
    file."""
    check_file(path, force=force, magic=_MAGIC, kind="GGUF file")


def fields_of(file: GGUFFile) -> dict[str, Field]:
    """All header fields of a file, for a changed copy."""
    return {key: file.field_bytes(key) for key in file.metadata if key != "general.alignment"}


def planned_as(infos: Iterable[TensorInfo]) -> list[Planned]:
    """Plan to write tensors unchanged."""
    return [Planned(info.name, info.shape, info.type) for info in infos]


def write_gguf(
    path: Path,
    fields: Mapping[str, Field],
    tensors: Sequence[Planned],
    data: Iterable[AnyArray],
    progress: Callable[[float], None] | None = None,
) -> None:
    """Write the file atomically. data: the bytes of every tensor in order, produced on demand.

    The checked reader then reads the file back. Raises InputError if it cannot be written.
    """
    with new_file(path) as temporary:
        with open(temporary, "wb") as out:
            out.write(_header(fields, tensors))
            done, total, arrays = 0, max(1, sum(each.nbytes for each in tensors)), iter(data)
            for tensor in tensors:
                _write_tensor(out, tensor, next(arrays, _NOTHING))  # no variable keeps it while the next one is made
                done += tensor.nbytes
                if progress:
                    progress(done / total)
            if next(arrays, None) is not None:
                raise ValueError("there is more data than tensors")
        _check(temporary, tensors)


def copy_gguf(
    file: GGUFFile, path: Path, tensors: Iterable[TensorInfo], progress: Callable[[float], None] | None = None
) -> None:
    """Copy a file's header and some of its tensors. Raises InputError."""
    infos = list(tensors)
    write_gguf(path, fields_of(file), planned_as(infos), (file.tensor_bytes(info) for info in infos), progress)


def write_outline(path: Path, fields: Mapping[str, Field], tensors: Sequence[Planned]) -> GGUFFile:
    """Write a sparse file of full size, with the header and holes for tensors, for planning. Raises InputError."""
    header = _header(fields, tensors)
    try:
        with open(path, "wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(_padded(tensor.nbytes) for tensor in tensors))
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror})") from None
    return read_gguf(path)


def _header(fields: Mapping[str, Field], tensors: Sequence[Planned]) -> bytes:
    parts, at = [struct.pack("<4sIQQ", _MAGIC, _VERSION, len(tensors), len(fields))], 0
    for key, value in fields.items():
        parts.append(_text(key) + _encode(value))
    for tensor in tensors:
        rank = len(tensor.shape)
        parts.append(_text(tensor.name) + struct.pack(f"<I{rank}Q", rank, *tensor.shape))
        parts.append(struct.pack("<IQ", TYPE_IDS[tensor.type], at))
        at += _padded(tensor.nbytes)
    header = b"".join(parts)
    return header.ljust(_padded(len(header)), b"\0")


def _write_tensor(out: BinaryIO, tensor: Planned, array: AnyArray) -> None:
    if array.nbytes != tensor.nbytes:
        raise ValueError(f"{tensor.name} has {array.nbytes} bytes, not {tensor.nbytes}")
    out.write(np.ascontiguousarray(array).data)
    out.write(bytes(_padded(tensor.nbytes) - tensor.nbytes))


def _check(path: Path, tensors: Sequence[Planned]) -> None:
    found = read_gguf(path).tensors
    if [(each.name, each.shape, each.type) for each in found.values()] != [
        (each.name, each.shape, each.type) for each in tensors
    ]:
        raise ModelFormatError("the written file does not read back as the same tensors")


def _encode(value: Field) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_text, value))
    code = _NUMBERS[value.dtype.name]
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", _ARRAY, code, value.size) + value.tobytes()
    return struct.pack("<I", code) + value.tobytes()


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
