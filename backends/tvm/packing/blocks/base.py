"""What a block type is to the native engine: how GGUF's bytes are re-laid, and what the kernel reads back.

Rows of a matrix are packed in tiles of 16, one row per lane. Within a tile, 64 bytes hold 4 neighbouring values of
each of the 16 rows, which is what the CPU's dot-product instructions take: 16 sums of 4 products at once.
Importing this needs no TVM; the functions that describe kernels take and give TVM expressions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

TILE = 16  # rows of a tile
PART = 32  # values that the kernel multiplies at a time, and that activations share a scale by

Bytes = NDArray[np.uint8]
Value = Any  # an expression of TVM


@dataclass(frozen=True)
class Split:
    """Blocks of GGUF taken apart.

    quants: [rows, parts, 4 per bit]. numbers: float16 as uint16 [rows, blocks, 1 or 2], d and the minimum's.
    factors: [rows, blocks, 2 per part] in super-blocks.
    """

    quants: Bytes
    numbers: NDArray[np.uint16]
    factors: Bytes | None = None


@dataclass(frozen=True)
class IntegerBlock:
    """Weights s · (q − center) + m, q small integers, in parts of 32 values.

    A block of one part has s and m as float16 numbers. A super-block has parts with two bytes of factors each, which
    its float16 numbers are to be multiplied with, for s and m: one byte each, or, where 16 values share them (`span`),
    one byte for the first half and one for the second, either s signed, or s and m of 4 bits.
    """

    name: str
    values: int  # of a block
    raw_bytes: int  # of a block of one row in GGUF
    planes: tuple[int, ...]  # bits of q that lie together, from its lowest
    split: Callable[[Bytes], Split]  # from uint8 [rows, blocks, raw_bytes]
    center: int = 0
    span: int = PART
    signed: bool = False  # whether q are signed bytes; unsigned ones are below 128
    has_minimum: bool = False  # whether there is an m
    codebook: tuple[int, ...] = ()  # signed bytes that the 4 bits of q stand for

    @property
    def parts(self) -> int:
        return self.values // PART

    @property
    def part_bytes(self) -> int:
        """Quants of a part of 16 rows."""
        return TILE * PART * sum(self.planes) // 8

    @property
    def numbers(self) -> int:
        """Float16 numbers of a block."""
        return 1 + self.has_minimum

    @property
    def scale_bytes(self) -> int:
        """Numbers and factors of a block of 16 rows."""
        return TILE * 2 * (self.numbers + (self.parts if self.parts > 1 else 0))

    @property
    def largest(self) -> int | None:
        """q; None if they are signed."""
        return None if self.signed else (1 << sum(self.planes)) - 1

    def packed_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of quants and of scales."""
        tiles = -(-rows // TILE)
        return tiles * (columns // PART) * self.part_bytes, tiles * (columns // self.values) * self.scale_bytes

    def pack(self, raw: Bytes) -> tuple[Bytes, Bytes]:
        """Quants [rows / 16, parts, part_bytes] and scales [rows / 16, blocks, scale_bytes], of whole tiles of rows."""
        split = self.split(raw)
        rows, parts, count = split.quants.shape
        fours = split.quants.reshape(rows // TILE, TILE, parts, count // 4, 4).transpose(0, 2, 3, 1, 4)
        scales = [_by_lanes(each) for each in (split.numbers, split.factors) if each is not None]
        return np.ascontiguousarray(fours), np.concatenate(scales, axis=-1)

    def registers(self, isa: Any, read: Callable[[int], Value]) -> Sequence[Value]:
        """The values 4i … 4i+3 of a part as the 4 bytes of each lane, for every i.

        read: gives the i-th 64 bytes of a packed part as 16 int32 lanes.
        """
        from edge.backends.tvm.cpu.kernels.lanes import let, move_bits

        registers: list[Value] = []
        for bits, first in zip(self.planes, accumulate(self.planes, initial=0), strict=False):
            words = [let(read(first + index)) for index in range(bits)]
            fields = [let(move_bits(word, bits, at, first)) for at in range(0, 8, bits) for word in words]
            registers = [let(low | high) for low, high in zip(registers, fields, strict=True)] if registers else fields
        return [let(isa.lookup(self.codebook, each)) for each in registers] if self.codebook else registers


@dataclass(frozen=True)
class FloatBlock:
    """Weights as floats, packed [rows / 16, columns, 16]. decode: 16 stored values (unsigned) to float32."""

    name: str
    raw_bytes: int
    dtype: str  # of the memory, as the kernel reads it
    decode: Callable[[Any, Value], Value]

    values = 1

    def pack(self, raw: Bytes) -> tuple[Bytes, Bytes]:
        rows, columns, _ = raw.shape
        tiles = raw.reshape(rows // TILE, TILE, columns, self.raw_bytes).swapaxes(1, 2)
        return np.ascontiguousarray(tiles), np.zeros((0,), np.uint8)

    def packed_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // TILE) * TILE * columns * self.raw_bytes, 0


Block = IntegerBlock | FloatBlock


def numbers_at(raw: Bytes, start: int, count: int) -> NDArray[np.uint16]:
    """The `count` float16 numbers from byte `start` of each block, as uint16 [rows, blocks, count]."""
    return np.ascontiguousarray(raw[:, :, start : start + 2 * count]).view("<u2")


def bits_of(raw: Bytes, bits: int, run: int) -> Bytes:
    """[rows, blocks, n] bytes to [rows, blocks, 8 n / bits] fields of `bits` bits.

    In every run of `run` bytes, the lowest fields of all bytes come first, then the next ones.
    """
    rows, blocks, _ = raw.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = raw.reshape(rows, blocks, -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(rows, blocks, -1)


def plane(values: Bytes, bits: int) -> Bytes:
    """[rows, blocks, n] values of `bits` bits to [rows, parts, 4 · bits] bytes.

    Byte i of a part has value i lowest, then value i + 4 · bits, and so on: for 4 bits, as in a block of Q4_0.
    """
    rows, _, _ = values.shape
    fields = values.reshape(rows, -1, 8 // bits, 4 * bits)
    packed: Bytes = np.bitwise_or.reduce(fields << np.arange(0, 8, bits, dtype=np.uint8)[:, None], axis=2)
    return packed


def growth(block: Block) -> float:
    """Packed bytes over the file's."""
    return sum(block.packed_bytes(TILE, block.values)) / (TILE * block.raw_bytes)


def _by_lanes(numbers: NDArray[Any]) -> Bytes:
    """[rows, blocks, n] numbers to [rows / 16, blocks, bytes]: each number of 16 rows side by side."""
    rows, blocks, count = numbers.shape
    tiles = np.ascontiguousarray(numbers.reshape(rows // TILE, TILE, blocks, count).transpose(0, 2, 3, 1))
    return tiles.view(np.uint8).reshape(rows // TILE, blocks, -1)
