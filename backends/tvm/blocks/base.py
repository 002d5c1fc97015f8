"""What a block type is to the native engine: how GGUF's bytes are re-laid, and what the kernel reads back.

Rows of a matrix are packed in tiles of 16, one row per lane. Within a tile, 64 bytes hold 4 neighbouring values of
each of the 16 rows, which is what the CPU's dot-product instructions take: 16 sums of 4 products at once.
Importing this needs no TVM; the functions that describe kernels take and give TVM expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 16  # rows of a tile

Bytes = NDArray[np.uint8]
Value = Any  # an expression of TVM


@dataclass(frozen=True)
class IntegerBlock:
    """Weights d · (q − center) + m in blocks of `values`, q small integers, d and m float16.

    pack: GGUF's bytes, uint8 [rows, blocks, raw_bytes], to the quants, uint8 [rows / 16, blocks, quant_bytes], and
    the scales, uint16 [rows / 16, blocks, 1 or 2, 16]. registers: from a function that gives the i-th 64 bytes of
    a packed block as 16 int32 lanes, to its values 4i … 4i+3 as the 4 bytes of each lane, for every i.
    """

    name: str
    values: int
    raw_bytes: int
    quant_bytes: int  # of 16 rows
    center: int
    largest: int  # q; unsigned ones must be below 128
    signed: bool  # whether q are signed bytes
    has_minimum: bool  # whether there is an m
    pack: Callable[[Bytes], tuple[Bytes, NDArray[np.uint16]]]
    registers: Callable[[Callable[[int], Value]], Sequence[Value]]

    @property
    def scale_bytes(self) -> int:
        """Of 16 rows."""
        return TILE * 2 * (1 + self.has_minimum)

    def packed_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of quants and of scales."""
        blocks = -(-rows // TILE) * (columns // self.values)
        return blocks * self.quant_bytes, blocks * self.scale_bytes


@dataclass(frozen=True)
class FloatBlock:
    """Weights as floats, packed [rows / 16, columns, 16]. decode: 16 stored values (unsigned) to float32."""

    name: str
    raw_bytes: int
    dtype: str  # of the memory, as the kernel reads it
    decode: Callable[[Any, Value], Value]

    values = 1

    def pack(self, raw: Bytes) -> tuple[Bytes, NDArray[np.uint16]]:
        rows, columns, _ = raw.shape
        tiles = raw.reshape(rows // TILE, TILE, columns, self.raw_bytes).swapaxes(1, 2)
        return np.ascontiguousarray(tiles), np.zeros((0,), np.uint16)

    def packed_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // TILE) * TILE * columns * self.raw_bytes, 0


Block = IntegerBlock | FloatBlock


def by_fours(values: Bytes) -> Bytes:
    """[rows, blocks, n] bytes to [rows / 16, blocks, n / 4, 16, 4]: 4 neighbours of 16 rows side by side."""
    rows, blocks, count = values.shape
    tiles: Bytes = values.reshape(rows // TILE, TILE, blocks, count // 4, 4).transpose(0, 2, 3, 1, 4)
    return tiles


def scales_of(raw: Bytes, count: int) -> NDArray[np.uint16]:
    """The `count` float16 numbers with which each block begins, as uint16 [rows / 16, blocks, count, 16]."""
    rows, blocks, _ = raw.shape
    numbers = np.ascontiguousarray(raw[:, :, : 2 * count]).view("<u2")
    return np.ascontiguousarray(numbers.reshape(rows // TILE, TILE, blocks, count).transpose(0, 2, 3, 1))
