"""The grids of block types: which values a block can take, and its bytes from scales, minima and codes.

A value is scale · level + minimum, where the code of 4, 5 or 8 bits says which level. Methods that choose scales and
codes themselves work on these; `blocks.py` rounds plainly.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from edge.errors import UnsupportedError
from edge.types import AnyArray, FloatArray

BLOCK = 32  # values that share a scale, in all of these types
_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # IQ4_NL's, from ggml
_MIDDLES = [(low + high) / 2 for low, high in pairwise(_NL)]
_NEAREST_NL = np.searchsorted(_MIDDLES, np.arange(-254, 255) / 2, side="right").astype(np.uint8)  # by halves of a level


@dataclass(frozen=True)
class Grid:
    """levels: float32, rising, by code. minima: blocks have one; it is −scale · an integer, so that zero is a value.

    uniform: levels are consecutive integers.
    """

    kind: str
    levels: FloatArray
    minima: bool = False
    uniform: bool = True

    @property
    def bits(self) -> int:
        return int(len(self.levels) - 1).bit_length()

    def codes(self, values: FloatArray, scales: FloatArray, minima: FloatArray | None = None) -> AnyArray:
        """The codes of the nearest levels, uint8; scales and minima as values or broadcast to them."""
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            inverse = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
        x = (values if minima is None else values - minima) * inverse
        if self.uniform:
            return np.asarray(np.clip(np.rint(x) - self.levels[0], 0, len(self.levels) - 1), np.uint8)
        return np.asarray(_NEAREST_NL[np.clip(np.floor(x + x), -254, 254).astype(np.int16) + 254])

    def values(self, codes: AnyArray, scales: FloatArray, minima: FloatArray | None = None) -> FloatArray:
        """What codes stand for, float32."""
        levels = codes.astype(np.float32) + self.levels[0] if self.uniform else self.levels[codes]
        return np.asarray(levels * scales if minima is None else levels * scales + minima, np.float32)


GRIDS = {
    "Q4_0": Grid("Q4_0", np.arange(-8, 8, dtype=np.float32)),
    "Q4_1": Grid("Q4_1", np.arange(16, dtype=np.float32), minima=True),
    "Q5_0": Grid("Q5_0", np.arange(-16, 16, dtype=np.float32)),
    "Q5_1": Grid("Q5_1", np.arange(32, dtype=np.float32), minima=True),
    "Q8_0": Grid("Q8_0", np.arange(-127, 128, dtype=np.float32)),
    "IQ4_NL": Grid("IQ4_NL", np.array(_NL, np.float32), uniform=False),
}


def find_grid(kind: str) -> Grid:
    """Raises UnsupportedError for types without one."""
    try:
        return GRIDS[kind]
    except KeyError:
        raise UnsupportedError(f"methods that choose codes know {', '.join(GRIDS)}, not {kind}") from None


@dataclass(frozen=True)
class Coded:
    """A rounded matrix. codes: uint8 [rows, columns]; scales and minima (or None): float32 [rows, blocks], values that
    float16 has."""

    grid: Grid
    codes: AnyArray
    scales: FloatArray
    minima: FloatArray | None = None

    @property
    def values(self) -> FloatArray:
        """float32 [rows, columns]."""
        minima = None if self.minima is None else _spread(self.minima)
        return self.grid.values(self.codes, _spread(self.scales), minima)

    @property
    def data(self) -> AnyArray:
        """The bytes as GGUF has them, uint8 [rows, bytes of a row]."""
        rows, blocks = self.scales.shape
        codes = self.codes.reshape(rows, blocks, BLOCK)
        numbers = [self.scales] if self.minima is None else [self.scales, self.minima]
        halves = (np.ascontiguousarray(number, np.float16) for number in numbers)
        parts: list[AnyArray] = [each.view(np.uint8).reshape(rows, blocks, 2) for each in halves]
        if self.grid.bits == 8:
            parts.append((codes.astype(np.int16) + np.int16(self.grid.levels[0])).astype(np.int8).view(np.uint8))
        else:
            if self.grid.bits == 5:
                parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
            low = codes & 15
            parts.append(low[..., : BLOCK // 2] | low[..., BLOCK // 2 :] << 4)
        return np.concatenate(parts, axis=-1).reshape(rows, -1)


def half(values: FloatArray) -> FloatArray:
    """The nearest float16 values, in float32."""
    return values.astype(np.float16).astype(np.float32)


def zero_scale(scales: FloatArray, levels: int) -> FloatArray:
    """The nearest scales whose multiples up to `levels` are float16 values all, so that −scale · zero is exact."""
    fraction, exponent = np.frexp(scales)
    kept = np.float32(1 << 11 - (levels - 1).bit_length())
    return half(np.ldexp(np.rint(fraction * kept) / kept, exponent).astype(np.float32))


def _spread(numbers: FloatArray) -> FloatArray:
    return np.repeat(numbers, BLOCK, axis=1)
