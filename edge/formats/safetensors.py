"""Reader and writer of safetensors: a JSON header with the tensors' places, then their bytes.

The header is not trusted: lengths, shapes and places must agree with each other and with the file.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import numpy as np

from edge.devices.regular import open_regular
from edge.errors import ModelFormatError
from edge.formats.arrays import read_array
from edge.formats.blocks import nbytes
from edge.formats.json_file import parse_object, shown
from edge.types import AnyArray
from edge.values import brief

_ALIGNMENT = 8  # of the first tensor that is written
_MOST_HEADER = 32 << 20  # bytes; a shard's header has a few hundred thousand
_SIZES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
          "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}  # fmt: skip
_DTYPES = {
    "U8": np.uint8, "I8": np.int8, "I16": np.int16, "I32": np.int32, "U32": np.uint32, "I64": np.int64,
    "F16": np.float16, "F32": np.float32, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor of a file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]  # outermost first
    offset: int  # from the file's start
    nbytes: int

    def read(self) -> AnyArray:
        """Read the tensor; BF16 as uint16, floats of 8 bits as uint8. Raises ModelFormatError."""
        if self.dtype not in _DTYPES:
            raise ModelFormatError(f"{self.path}: {self.name} is of type {self.dtype}, which no weights here have")
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                data = read_array(file, np.uint8, self.nbytes)
        except OSError as error:
            raise ModelFormatError(f"{self.path}: cannot be read ({error.strerror})") from None
        if data.size != self.nbytes:
            raise ModelFormatError(f"{self.path}: the file became shorter while it was read")
        return data.view(_DTYPES[self.dtype]).reshape(self.shape)


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, by name. Raises ModelFormatError with one line."""
    return read_whole_header(path)[0]


def read_whole_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """The tensors of a safetensors file, by name, and the texts of its metadata. Raises ModelFormatError."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            if len(start) < 8:
                raise ModelFormatError(f"{path}: only {size} bytes: no safetensors file")
            (length,) = struct.unpack("<Q", start)
            if length > min(_MOST_HEADER, size - 8):
                raise ModelFormatError(f"{path}: its header claims {length} bytes: the file is damaged or truncated")
            text = file.read(length)
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None
    said = parse_object(text, f"{path}: its header")
    more = said.pop("__metadata__", None)
    facts = {key: value for key, value in more.items() if isinstance(value, str)} if isinstance(more, dict) else {}
    first = 8 + length
    found = {name: _stored(path, name, entry, first) for name, entry in said.items()}
    _check_places(path, found, first, size)
    return found, facts


def _stored(path: Path, name: str, entry: Any, first: int) -> Stored:
    where = f"{path}: {shown(name)}"
    if not isinstance(entry, dict):
        raise ModelFormatError(f"{where} is not described: the file is damaged")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise ModelFormatError(f"{where} is of the unknown type {brief(dtype)}")
    if not _counts(shape) or len(shape) > 8:
        raise ModelFormatError(f"{where} has the impossible shape {brief(shape)}")
    if not _counts(offsets) or len(offsets) != 2:
        raise ModelFormatError(f"{where} lies at {brief(offsets)}: the file is damaged")
    begin, end = offsets
    needed = prod(shape) * _SIZES[dtype]
    if end - begin != needed:
        raise ModelFormatError(f"{where} has {end - begin} bytes, but {dtype} {brief(shape)} needs {needed}")
    return Stored(path, name, dtype, tuple(shape), first + begin, needed)


def _counts(value: Any) -> TypeGuard[list[int]]:
    """Whether a value is a list of integers that a file could hold."""
    return isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 1 << 48 for each in value
    )


def _check_places(path: Path, found: dict[str, Stored], first: int, size: int) -> None:
    """Check that tensors follow each other without gaps or overlaps, up to the file's end."""
    expected = first
    for each in sorted(found.values(), key=lambda stored: (stored.offset, stored.nbytes)):
        if each.offset != expected:
            raise ModelFormatError(
                f"{path}: {shown(each.name)} lies at {each.offset}, but {expected} is next: the file is damaged"
            )
        expected += each.nbytes
    if expected != size:
        raise ModelFormatError(f"{path}: its tensors end at byte {expected}, the file at {size}: it is truncated")


# Writing


@dataclass(frozen=True)
class Planned:
    """A tensor to be written."""

    name: str
    dtype: str  # F32, F16 or BF16
    shape: tuple[int, ...]  # outermost first

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, prod(self.shape))


def write_safetensors(
    path: Path,
    tensors: Sequence[Planned],
    data: Iterable[AnyArray],
    progress: Callable[[float], None] | None = None,
    facts: Mapping[str, str] | None = None,
) -> None:
    """Write the file. data: every tensor in order, produced on demand, BF16 as uint16. facts: metadata. Raises
    OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(facts or {})}}
    at = 0
    for tensor in tensors:
        place = [at, at + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": place}
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        done, arrays = 0, iter(data)
        for tensor in tensors:
            _write_tensor(out, tensor, next(arrays))  # no variable keeps it while the next one is made
            done += tensor.nbytes
            if progress:
                progress(done / at)


def _write_tensor(out: BinaryIO, tensor: Planned, array: AnyArray) -> None:
    if array.nbytes != tensor.nbytes:
        raise ValueError(f"{tensor.name} has {array.nbytes} bytes, not {tensor.nbytes}")
    out.write(np.ascontiguousarray(array).data)
