"""WAV files, read from first to last byte, so that pipes are read, too: PCM of 8 to 32 bits, and floats."""

from __future__ import annotations

import struct
from typing import BinaryIO

import numpy as np

from edge.errors import InputError
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_MOST_BEFORE = 16 << 20  # bytes of other chunks before the samples
_UNKNOWN = 0xFFFFFF00  # sizes from here on, and 0, are those of a program that could not know them: until the end


class OtherWavError(InputError):
    """A WAV file of an encoding that this reader does not know, such as A-law."""


@dataclass(frozen=True)
class WavFormat:
    """The form of samples. frames: samples per channel that the header states, None if it cannot."""

    rate: int
    channels: int
    width: int  # bytes of a sample
    floats: bool
    frames: int | None = None

    def decode(self, data: bytes) -> FloatArray:
        """Whole frames as float32 [frames, channels], from -1 to 1 for integers; a part of a frame is left out."""
        data = data[: len(data) // (self.width * self.channels) * self.width * self.channels]
        found: AnyArray
        if self.floats:
            found = np.frombuffer(data, f"<f{self.width}")
        elif self.width == 1:
            found = (np.frombuffer(data, np.uint8).astype(np.float32) - 128) / 128
        elif self.width == 3:
            parts = np.zeros((len(data) // 3, 4), np.uint8)
            parts[:, 1:] = np.frombuffer(data, np.uint8).reshape(-1, 3)
            found = parts.view("<i4")[:, 0].astype(np.float32) / (1 << 31)
        else:
            found = np.frombuffer(data, f"<i{self.width}").astype(np.float32) / (1 << (8 * self.width - 1))
        with np.errstate(over="ignore"):  # doubles beyond float32 are refused as infinite
            return np.asarray(found, np.float32).reshape(-1, self.channels)


def read_header(file: BinaryIO, name: str) -> WavFormat:
    """Read up to the first sample. Raises InputError; OtherWavError for other encodings."""
    if file.read(4) not in (b"RIFF", b"RF64") or len(file.read(4)) < 4 or file.read(4) != b"WAVE":
        raise InputError(f"{name} is no WAV file")
    form, passed, long = None, 0, 0
    while True:
        head = file.read(8)
        if len(head) < 8:
            raise InputError(f"{name} is damaged: it ends before its samples")
        kind, size = head[:4], int.from_bytes(head[4:], "little")
        if kind == b"data":
            if form is None:
                raise InputError(f"{name} is damaged: its samples come before their format")
            size = size if 0 < size < _UNKNOWN else long
            return WavFormat(*form, size // (form[1] * form[2]) if size else None)
        passed += size + size % 2
        if passed > _MOST_BEFORE:
            raise InputError(f"{name} is damaged: a part of {size:,} bytes stands before its samples")
        body = file.read(size + size % 2)
        if len(body) < size:
            raise InputError(f"{name} is damaged: it ends before its samples")
        if kind == b"ds64":  # of RF64
            long = int.from_bytes(body[8:16], "little")
        if kind == b"fmt ":
            form = _format(body, name)


def _format(body: bytes, name: str) -> tuple[int, int, int, bool]:
    if len(body) < 16:
        raise InputError(f"{name} is damaged: its format has {len(body)} bytes, 16 are the fewest")
    kind, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", body)
    if kind == _EXTENSIBLE and len(body) >= 26:
        kind = int.from_bytes(body[24:26], "little")
    widths = {_PCM: (8, 16, 24, 32), _FLOAT: (32, 64)}.get(kind)
    if widths is None:
        raise OtherWavError(f"{name} has the WAV encoding {kind}")
    if bits not in widths or frame != channels * bits // 8 or not channels:
        raise InputError(f"{name} is damaged: {channels} channels of {bits} bits in {frame} bytes")
    return rate, channels, bits // 8, kind == _FLOAT
