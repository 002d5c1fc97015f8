"""Reader of GGUF headers that trusts nothing in them.

Engines see a file only after this reader has accepted it: magic, version, counts, string and array lengths, tensor
shapes, offsets, alignment and the size of the file are checked here. The header is read in a sliding window, and large
arrays stay on disk until needed, so that memory stays below 64 MiB whatever the file claims.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from edge.devices.output import work_folder
from edge.devices.regular import open_regular
from edge.errors import ModelFormatError, UnsupportedError
from edge.formats.arrays import read_array
from edge.formats.blocks import BLOCK_TYPES
from edge.formats.compiled import Compiled
from edge.records import dataclass
from edge.values import brief

MAX_HEADER = 48 << 20  # bytes; the largest real vocabularies (262k tokens with merges) need about 16 MiB
MAX_STRING = 1 << 20  # bytes; chat templates are the longest honest strings, a few tens of KiB
MAX_TEXT = 4 << 20  # bytes of keys, strings and names together: they stay in memory, up to four times as large
MAX_ITEMS = 1 << 21  # strings in a list; the largest real vocabularies have half a million merges
MAX_COUNT = 1 << 14  # metadata keys, and tensors; real files have hundreds to a few thousand
MAX_KEY = 128  # bytes of a metadata key; the longest real ones have about 60
MAX_NAME = 63  # bytes of a tensor name that ggml can hold
MIN_ALIGNMENT, MAX_ALIGNMENT = 32, 1 << 20  # ggml aborts on mapped tensors that are aligned to less
_WINDOW = 1 << 20  # bytes read from disk at a time
_GUESSED = 1 << 16  # bytes of strings whose lengths are found at once: more would not stay in the processor's cache
_WALKED = 512  # strings read one by one after a wrong guess, which takes about as long

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_PLACES = {rank: struct.Struct(f"<{rank}QIQ") for rank in range(1, 5)}  # a tensor's extents, type and offset


@dataclass(frozen=True)
class TensorInfo:
    """A tensor of the file."""

    name: str
    shape: tuple[int, ...]  # in ggml's order, innermost first
    type: str
    type_id: int
    offset: int  # from the file's start
    nbytes: int
    factor: float = 1.0  # of an NVFP4 matrix's values: `blk.0.attn_q.scale` of `blk.0.attn_q.weight`, as of llama.cpp

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Rows of a matrix, or of all matrices of a tensor with more dimensions; for a vector, its values."""
        return self.elements // self.shape[0] if len(self.shape) > 1 else self.elements


@dataclass(frozen=True)
class ArrayRef:
    """A header array that was checked but left on disk. Read it with `GGUFFile.numbers` or `GGUFFile.strings`."""

    type_id: int
    count: int
    offset: int


class CutHeaderError(ModelFormatError):
    """The header is cut off: the file is incomplete here."""


class _Cursor:
    """Reads the header forward through one window of bytes; every read is checked against the file's end."""

    def __init__(self, file: BinaryIO, size: int, offset: int = 0) -> None:
        self._file, self._size = file, size
        self._buffer, self._start, self._at = b"", offset, 0
        self._kept = 0
        file.seek(offset)

    @property
    def offset(self) -> int:
        return self._start + self._at

    def take(self, count: int) -> int:
        """Make `count` bytes available and step over them; return their index in `self._buffer`."""
        end = self.offset + count
        if end > self._size:
            raise ModelFormatError(f"the file is truncated: its header continues past the end ({self._size} bytes)")
        if end > MAX_HEADER:
            raise ModelFormatError(
                f"the header is larger than {MAX_HEADER >> 20} MiB: not a GGUF file that edge will read"
            )
        if self._at + count > len(self._buffer):
            rest = self._buffer[self._at :]
            self._start, self._at = self.offset, 0
            self._buffer = rest + self._file.read(max(count - len(rest), _WINDOW))
            if len(self._buffer) < count:
                raise CutHeaderError("the file became shorter while it was read")
        self._at += count
        return self._at - count

    def numbers(self, form: struct.Struct) -> tuple[Any, ...]:
        at = self.take(form.size)
        return form.unpack_from(self._buffer, at)

    def scalar(self, form: struct.Struct) -> Any:
        return self.numbers(form)[0]

    def text(self, limit: int, what: str) -> str:
        length = self.scalar(_SCALARS[10])
        if length > limit:
            raise ModelFormatError(f"{what} claims {length} bytes (at most {limit} are allowed): the file is damaged")
        at = self.take(length)
        return self._buffer[at : at + length].decode("utf-8", errors="replace")

    def keep_text(self, limit: int, what: str) -> str:
        """Like `text`, for a string that stays in memory while the file is open."""
        text = self.text(limit, what)
        self._kept += len(text.encode())
        if self._kept > MAX_TEXT:
            raise ModelFormatError(f"the header holds more than {MAX_TEXT >> 20} MiB of names and texts")
        return text

    def name(self, limit: int, what: str) -> str:
        """A key or a tensor's name. Control characters are refused: C code would see names end at a zero byte."""
        name = self.keep_text(limit, f"the name of a {what}")
        if not name or not name.isprintable():
            raise ModelFormatError(f"{brief(name)} cannot be the name of a {what}: the file is damaged")
        return name

    def skip(self, count: int) -> None:
        """Step over `count` bytes without keeping them."""
        while count > 0:
            step = min(count, _WINDOW)
            self.take(step)
            count -= step

    def skip_strings(self, count: int, what: str) -> None:
        """Step over `count` strings without keeping them. Raises ModelFormatError.

        Guesses the positions of many lengths at once: a length from 1 to 255 is a byte before seven zeros. Guesses are
        right as long as each string ends at the next length. Where the first guess is wrong, strings are read one by
        one.
        """
        while count:
            data = np.frombuffer(self._buffer, np.uint8)[self._at : self._at + _GUESSED]
            lengths = _likely_lengths(data)
            ends = lengths + 8 + data[lengths]
            right = np.concatenate([lengths[:1] == 0, ends[:-1] == lengths[1:]]) & (ends <= data.size)
            if held := min(count, int(right.size if right.all() else right.argmin())):
                self._at += int(ends[held - 1])
                count -= held
                continue
            walked = min(count, _WALKED)
            for _ in self.spans(walked, MAX_STRING, what):
                pass
            count -= walked

    def spans(self, count: int, limit: int, what: str) -> Iterator[tuple[bytes, int, int]]:
        """Iterate over `count` strings, each as a buffer, its start and its end there. Raises ModelFormatError.

        Vocabularies hold a hundred thousand, so strings that lie entirely in the window are found without a call.
        """
        length_at = _SCALARS[10].unpack_from
        while count:
            buffer, at, size = self._buffer, self._at, len(self._buffer)
            while count and at + 8 <= size:
                (length,) = length_at(buffer, at)
                end = at + 8 + length
                if length > limit or end > size:
                    break
                yield buffer, at + 8, end
                at, count = end, count - 1
            self._at = at
            if count:
                length = self.scalar(_SCALARS[10])
                if length > limit:
                    raise ModelFormatError(f"a string in {what} claims {length} bytes: the file is damaged")
                start = self.take(length)
                yield self._buffer, start, start + length
                count -= 1


def _likely_lengths(data: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Indexes of non-zero bytes before seven zero bytes."""
    zero = data == 0
    two = zero[:-1] & zero[1:]
    four = two[:-2] & two[2:]
    seven = four[:-3] & four[3:]
    return np.flatnonzero(seven[1:] & ~zero[: max(0, seven.size - 1)])


@dataclass(frozen=True, eq=False)  # compared by identity: caches are keyed by it
class GGUFFile:
    """A checked GGUF header."""

    path: Path
    size: int
    version: int
    metadata: dict[str, Any]  # Python scalars, strings or `ArrayRef`s
    tensors: dict[str, TensorInfo]
    data_offset: int
    spans: dict[str, tuple[int, int]]  # where a key's type and value lie in the file
    folder: Path | None = None  # the folder of an ONNX model, which holds the weights instead
    compiled: Compiled | None = None  # the context binaries of that folder

    def count(self, key: str) -> int:
        """The length of an array. Raises ModelFormatError if there is none."""
        return self._array_ref(key).count

    def strings(self, key: str) -> list[str]:
        """The strings of an array of strings. Raises ModelFormatError if it is not one."""
        pieces = list(self.raw_strings(key))
        # Decoded together, a hundred thousand take a third of the time. A zero byte within one changes their number.
        texts = b"\0".join(pieces).decode("utf-8", errors="replace").split("\0")
        return texts if len(texts) == len(pieces) else [piece.decode("utf-8", errors="replace") for piece in pieces]

    def raw_strings(self, key: str) -> Iterator[bytes]:
        """Iterate over an array of strings as bytes. Raises ModelFormatError if it is not one."""
        ref = self._array_ref(key)
        if ref.type_id != _STRING:
            raise ModelFormatError(f"{self.path}: {key} is not a list of strings")
        with open(self.path, "rb") as file:
            for buffer, start, end in _Cursor(file, self.size, ref.offset).spans(ref.count, MAX_STRING, key):
                yield buffer[start:end]

    def numbers(self, key: str) -> np.ndarray[Any, Any]:
        """A numeric array as NumPy, in its own dtype. Raises ModelFormatError if it is not one."""
        ref = self._array_ref(key)
        if ref.type_id not in _SCALARS:
            raise ModelFormatError(f"{self.path}: {key} is not a list of numbers")
        with open(self.path, "rb") as file:
            file.seek(ref.offset)
            return read_array(file, _SCALARS[ref.type_id].format, ref.count)

    def field_bytes(self, key: str) -> bytes:
        """A field's type and value in the file's encoding."""
        return b"".join(self.field_parts(key))

    def field_parts(self, key: str) -> Iterator[bytes]:
        """`field_bytes` in parts of at most a MiB."""
        start, end = self.spans[key]
        with open(self.path, "rb") as file:
            file.seek(start)
            while start < end and (part := file.read(min(end - start, _WINDOW))):
                start += len(part)
                yield part

    def tensor_bytes(self, info: TensorInfo) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The raw bytes of one tensor, uint8 [nbytes], read into memory."""
        with open(self.path, "rb") as file:
            file.seek(info.offset)
            data = read_array(file, np.uint8, info.nbytes)
        if data.size != info.nbytes:
            raise ModelFormatError(f"{self.path}: tensor {info.name} ends before its {info.nbytes} bytes")
        return data

    def _array_ref(self, key: str) -> ArrayRef:
        ref = self.metadata.get(key)
        if not isinstance(ref, ArrayRef):
            raise ModelFormatError(f"{self.path}: the list {key} is missing")
        return ref


def read_gguf(path: str | Path, size: int | None = None, *, part: bool = False) -> GGUFFile:
    """Read and check the header of a GGUF file (versions 2 and 3, little-endian, one file).

    size: bytes of the whole file if `path` holds only its beginning; weights cannot be read from it. part: also accept
    a part of a model split into several files (`gguf_parts.py`).
    Raises ModelFormatError with one line that names the fault, UnsupportedError for valid files that edge does not read
    (big-endian, split into several files, unknown tensor types).
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ModelFormatError(f"{path}: not a file" if path.exists() else f"{path}: no such file")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            if size == 0:
                raise ModelFormatError("the file is empty")
            return _read_header(path, size, _Cursor(file, size), part=part)
    except (ModelFormatError, UnsupportedError) as error:
        message = str(error)
        raise type(error)(message if message.startswith(str(path)) else f"{path}: {message}") from None
    except OSError as error:
        raise ModelFormatError(f"{path}: cannot be read ({error.strerror})") from None


@contextmanager
def at_full_size(file: GGUFFile) -> Iterator[Path]:
    """The file's path or, if only its beginning is on disk, a sparse copy of full size, for readers that check sizes.

    Raises InputError if the copy cannot be written.
    """
    if file.path.stat().st_size >= file.size:
        yield file.path
        return
    import shutil

    with work_folder() as folder:
        path = folder / file.path.name
        shutil.copyfile(file.path, path)
        os.truncate(path, file.data_offset)
        os.truncate(path, file.size)
        yield path


def _read_header(path: Path, size: int, cursor: _Cursor, *, part: bool) -> GGUFFile:
    if size < 24:
        raise ModelFormatError(f"not a GGUF file: only {size} bytes")
    magic = struct.pack("<I", cursor.scalar(_SCALARS[4]))
    if magic != b"GGUF":
        if magic == b"EDGE":
            raise ModelFormatError(
                "not a GGUF file, but a bundle's, which apps open: name the model that it was made of"
            )
        raise ModelFormatError(f"not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    version = cursor.scalar(_SCALARS[4])
    if version and version & 0xFFFF == 0:
        raise UnsupportedError("a big-endian GGUF file: edge reads little-endian files only")
    if version not in (2, 3):
        raise UnsupportedError(f"GGUF version {version}: edge reads versions 2 and 3")
    tensor_count, key_count = cursor.scalar(_SCALARS[10]), cursor.scalar(_SCALARS[10])
    for count, what in ((tensor_count, "tensors"), (key_count, "metadata keys")):
        if count > MAX_COUNT:
            raise ModelFormatError(f"the header claims {count} {what} (at most {MAX_COUNT} are allowed)")

    metadata: dict[str, Any] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(key_count):
        key = cursor.name(MAX_KEY, "metadata key")
        if key in metadata:
            raise ModelFormatError(f"metadata key {key!r} appears twice")
        start = cursor.offset
        metadata[key] = _read_value(cursor, key, cursor.scalar(_SCALARS[4]))
        spans[key] = start, cursor.offset
    if (parts := metadata.get("split.count", 0)) not in (0, 1) and not part:
        raise UnsupportedError(
            f"one part of a model split into {brief(parts)} files: pass it beside the others, under names such as "
            f"NAME-00001-of-{parts:05}.gguf"
            if isinstance(parts, int)
            else "one part of a model split into files"
        )

    alignment = metadata.get("general.alignment", 32)
    in_range = isinstance(alignment, int) and MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT
    if not in_range or alignment & (alignment - 1):
        raise ModelFormatError(
            f"general.alignment is {brief(alignment)}: "
            f"it must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}"
        )

    described = [_read_tensor_info(cursor) for _ in range(tensor_count)]
    data_offset = -(-cursor.offset // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    expected = 0
    for info in described:
        if info.name in tensors:
            raise ModelFormatError(f"tensor {info.name!r} appears twice")
        if info.offset != expected:
            raise ModelFormatError(
                f"tensor {info.name!r} lies at {info.offset}, but {expected} is next: the file is damaged"
            )
        expected += -(-info.nbytes // alignment) * alignment
        absolute = data_offset + info.offset
        if absolute + info.nbytes > size:
            raise ModelFormatError(
                f"the file is truncated: tensor {info.name!r} ends at byte {absolute + info.nbytes}, the file at {size}"
            )
        tensors[info.name] = TensorInfo(info.name, info.shape, info.type, info.type_id, absolute, info.nbytes)
    _read_factors(path, tensors)
    return GGUFFile(path, size, version, metadata, tensors, data_offset, spans)


FACTORED = "NVFP4"  # the block type whose scales reach so little that a matrix has a factor


def factor_name(name: str) -> str:
    """The name of the tensor that holds the factor of a matrix."""
    return name.removesuffix("weight") + "scale"


def input_factor_name(name: str) -> str:
    """The name of the factor of a matrix's inputs in FP4, which edge has in 8 bits."""
    return name.removesuffix("weight") + "input_scale"


def factors_of(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors that hold factors, by the names of matrices. Experts with a factor each are not among them."""
    scales = {name: tensors.get(factor_name(name)) for name, info in tensors.items() if info.type == FACTORED}
    return {name: scale for name, scale in scales.items() if scale and (scale.type, scale.elements) == ("F32", 1)}


def _read_factors(path: Path, tensors: dict[str, TensorInfo]) -> None:
    """Set the factors of matrices that have one; in a file that is cut off, they stay 1."""
    for name, scale in factors_of(tensors).items():
        with open(path, "rb") as file:
            file.seek(scale.offset)
            found = read_array(file, np.float32, 1)
        if found.size:
            if not np.isfinite(found[0]):
                raise ModelFormatError(f"tensor {scale.name!r} is no number")
            tensors[name] = replace(tensors[name], factor=float(found[0]))


def _read_value(cursor: _Cursor, key: str, type_id: int) -> Any:
    if type_id in _SCALARS:
        return cursor.scalar(_SCALARS[type_id])
    if type_id == _STRING:
        return cursor.keep_text(MAX_STRING, f"metadata {key!r}")
    if type_id != _ARRAY:
        raise ModelFormatError(f"metadata {key!r} has the unknown type {type_id}")
    item_type, count = cursor.scalar(_SCALARS[4]), cursor.scalar(_SCALARS[10])
    ref = ArrayRef(item_type, count, cursor.offset)
    if item_type in _SCALARS:
        nbytes = count * _SCALARS[item_type].size
        if nbytes > MAX_HEADER:
            raise ModelFormatError(f"the list {key!r} claims {count} items: the file is damaged")
        cursor.skip(nbytes)
    elif item_type == _STRING:
        if count > MAX_ITEMS:
            raise ModelFormatError(f"the list {key!r} claims {count} strings: the file is damaged")
        cursor.skip_strings(count, repr(key))
    else:
        raise ModelFormatError(f"the list {key!r} holds items of type {item_type}, which edge does not read")
    return ref


def _read_tensor_info(cursor: _Cursor) -> TensorInfo:
    name = cursor.name(MAX_NAME, "tensor")
    rank = cursor.scalar(_SCALARS[4])
    if not 1 <= rank <= 4:
        raise ModelFormatError(f"tensor {name!r} claims {rank} dimensions (1 to 4 are allowed)")
    *extents, type_id, offset = cursor.numbers(_PLACES[rank])
    shape = tuple(extents)
    elements = 1
    for extent in shape:
        elements *= extent
    if not 0 < elements < 1 << 48:
        raise ModelFormatError(f"tensor {name!r} has the impossible shape {shape}")
    if type_id not in BLOCK_TYPES:
        raise UnsupportedError(f"tensor {name!r} has the unknown type {type_id}")
    type_name, block, block_bytes, _ = BLOCK_TYPES[type_id]
    if shape[0] % block:
        raise ModelFormatError(
            f"tensor {name!r}: rows of {shape[0]} values do not divide into {type_name} blocks of {block}"
        )
    return TensorInfo(name, shape, type_name, type_id, offset, elements // block * block_bytes)
