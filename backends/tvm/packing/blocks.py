"""GGUF's block types for the native engine, and their packing for its kernels.

Rows of a matrix are packed in tiles of 16, one row per lane. Within a tile, 64 bytes hold 4 consecutive values of each
of the 16 rows, the operands of a dot-product instruction: 16 sums of 4 products at once. cpu/kernels/matmul.py reads
the packed bytes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.backends.tvm.packing import splits
from edge.backends.tvm.packing.splits import LOW_BITS, BlockParts, Bytes
from edge.formats.blocks import FP4, IQ4_NL, block_size, nbytes
from edge.records import dataclass

TILE = 16  # rows of a tile
PART = 32  # values that the kernel multiplies at a time, and for which activations have one scale


@dataclass(frozen=True)
class IntegerBlock:
    """A block type of weights s · (q − center) + m with small integers q, in parts of 32 values.

    A block of one part has s and m as float16 numbers, as have super-blocks without factors. Others have two bytes of
    factors per part, which are multiplied by the float16 numbers: one byte each for s, signed where there is no m, and
    m; or, where 16 values share them (`group_size`), one byte for each half, which holds either a signed s, or s and m
    of 4 bits.
    """

    name: str
    planes: tuple[int, ...]  # numbers of bits of q that are stored together, the lowest first
    split: Callable[[Bytes], BlockParts]  # from uint8 [rows, blocks, raw_bytes]
    center: int = 0
    group_size: int = PART
    signed: bool = False  # whether q is a signed byte; unsigned values are below 128
    has_minimum: bool = False  # whether there is an m
    exponents: bool = False  # s is a byte instead of a float16: 2^(byte − 128)
    codebook: tuple[int, ...] = ()  # 16 signed bytes, which the bits of q stand for
    has_factors: bool = True  # of super-blocks
    unit: float = 1.0  # a power of two, by which the float16 numbers are multiplied
    offset: float = 0.0  # added to q − center; has few bits, so that its product with s is exact
    halves: tuple[IntegerBlock, ...] = ()  # the high and the low bits of q, which lie apart (`HALVED`)
    before: int = 0  # of a half: bits of each weight that lie before it in a band

    @property
    def banded(self) -> bool:
        return bool(self.halves or self.offset)

    @property
    def values(self) -> int:
        """Values per block."""
        return block_size(self.stored)

    @property
    def stored(self) -> str:
        """The block type in GGUF."""
        return self.name.split()[0]

    @property
    def raw_bytes(self) -> int:
        """Bytes of a block of one row in GGUF."""
        return nbytes(self.stored, self.values)

    @property
    def parts(self) -> int:
        return self.values // PART

    @property
    def part_bytes(self) -> int:
        """Bytes of the quants of a part of 16 rows."""
        return TILE * PART * sum(self.planes) // 8

    @property
    def factored(self) -> bool:
        return self.has_factors and self.parts > 1

    @property
    def numbers(self) -> int:
        """Float16 numbers per block."""
        return 1 + self.has_minimum

    @property
    def scale_bytes(self) -> int:
        """Bytes of the numbers and factors of a block of 16 rows."""
        if self.exponents:
            return TILE
        return TILE * 2 * (self.numbers + (self.parts if self.factored else 0))

    @property
    def largest(self) -> int | None:
        """The largest q; None if q is signed."""
        return None if self.signed else (1 << sum(self.planes)) - 1

    def packed_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of packed quants and scales."""
        tiles = -(-rows // TILE)
        return tiles * (columns // PART) * self.part_bytes, tiles * (columns // self.values) * self.scale_bytes

    def pack(self, raw: Bytes, factor: float = 1.0) -> tuple[Bytes, Bytes]:
        """Pack whole tiles of rows: quants [rows / 16, parts, part_bytes] and scales [rows / 16, blocks,
        scale_bytes]. factor: of all values."""
        if self.halves:
            return self._pack_halves(raw)
        split = self.split(raw).times(factor)
        rows, parts, count = split.quants.shape
        fours = split.quants.reshape(rows // TILE, TILE, parts, count // 4, 4).view(np.uint32)[..., 0]
        quants = np.ascontiguousarray(fours.transpose(0, 2, 3, 1)).view(np.uint8)
        scales = [_by_lanes(each) for each in (split.numbers, split.factors) if each is not None]
        return quants, np.concatenate(scales, axis=-1)

    def _pack_halves(self, raw: Bytes) -> tuple[Bytes, Bytes]:
        """Pack whole bands; the last may be shorter: quants uint8 [bytes]."""
        parts = [half.pack(raw) for half in self.halves]
        tiles = len(raw) // TILE
        bands = [quants[at : at + BAND].reshape(-1) for at in range(0, tiles, BAND) for quants, _ in parts]
        return np.concatenate(bands), parts[0][1]


@dataclass(frozen=True)
class FloatBlock:
    """A type of float weights, packed [rows / 16, columns, 16]."""

    name: str
    dtype: str  # in memory, as the kernel reads it

    values = 1

    @property
    def raw_bytes(self) -> int:
        return nbytes(self.name, 1)

    def pack(self, raw: Bytes, factor: float = 1.0) -> tuple[Bytes, Bytes]:
        assert factor == 1
        rows, columns, _ = raw.shape
        tiles = raw.reshape(rows // TILE, TILE, columns, self.raw_bytes).swapaxes(1, 2)
        return np.ascontiguousarray(tiles), np.zeros((0,), np.uint8)

    def packed_bytes(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // TILE) * TILE * columns * self.raw_bytes, 0


Block = IntegerBlock | FloatBlock


def growth(block: Block) -> float:
    """Packed bytes / bytes in the file."""
    return sum(block.packed_bytes(TILE, block.values)) / (TILE * block.raw_bytes)


def _by_lanes(numbers: NDArray[Any]) -> Bytes:
    """Rearrange numbers [rows, blocks, n] to bytes [rows / 16, blocks, bytes], with each number of 16 rows side by
    side."""
    rows, blocks, count = numbers.shape
    tiles = np.ascontiguousarray(numbers.reshape(rows // TILE, TILE, blocks, count).transpose(0, 2, 3, 1))
    return tiles.view(np.uint8).reshape(rows // TILE, blocks, -1)


_SIGNS = (-1, 1, *[0] * 14)
_TERNARY = (-1, 0, 1, 2, *[0] * 12)  # 2 is in no file that ggml writes
_ODD = (1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15)
_EIGHT = (4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62)
_THREE = (8, 25, 43, 0, -8, -25, -43, *[0] * 9)
_SHIFTED = (-7, 1, 9, 0, -9, -1, 7, *[0] * 9)
_TYPES: tuple[Block, ...] = (
    FloatBlock("F32", "float32"),
    FloatBlock("F16", "uint16"),
    FloatBlock("BF16", "uint16"),
    IntegerBlock("Q4_0", (4,), splits.plain, center=8),
    IntegerBlock("Q4_1", (4,), splits.q4_1, has_minimum=True),
    IntegerBlock("Q5_0", (4, 1), splits.q5_0, center=16),
    IntegerBlock("Q5_1", (4, 1), splits.q5_1, has_minimum=True),
    IntegerBlock("Q8_0", (8,), splits.plain, signed=True),
    IntegerBlock("IQ4_NL", (4,), splits.plain, signed=True, codebook=IQ4_NL),
    IntegerBlock("MXFP4", (4,), splits.mxfp4, signed=True, codebook=FP4, exponents=True),
    IntegerBlock("NVFP4", (4,), splits.nvfp4, group_size=16, signed=True, codebook=FP4, unit=1 / 1024),
    IntegerBlock("Q2_K", (2,), splits.q2_k, group_size=16, has_minimum=True),
    IntegerBlock("Q3_K", (2, 1), splits.q3_k, center=4, group_size=16),
    IntegerBlock("Q4_K", (4,), splits.q4_k, has_minimum=True),
    IntegerBlock("Q5_K", (4, 1), splits.q5_k, has_minimum=True),
    IntegerBlock("Q6_K", (4, 2), splits.q6_k, center=32, group_size=16),
    IntegerBlock("IQ4_XS", (4,), splits.iq4_xs, signed=True, codebook=IQ4_NL),
    IntegerBlock("IQ3_S", (4,), splits.iq3_s, signed=True, codebook=_ODD),
    IntegerBlock("IQ3_XXS", (4,), splits.iq3_xxs, signed=True, codebook=_EIGHT, unit=1 / 4),
    IntegerBlock("IQ2_XXS", (2, 1), splits.iq2_xxs, signed=True, codebook=_THREE, unit=1 / 8),
    IntegerBlock("IQ2_XS", (2, 1), splits.iq2_xs, group_size=16, signed=True, codebook=_THREE, unit=1 / 8),
    IntegerBlock("IQ2_S", (2, 1), splits.iq2_s, group_size=16, signed=True, codebook=_THREE, unit=1 / 8),
    IntegerBlock("IQ1_S", (2, 1), splits.iq1_s, signed=True, codebook=_SHIFTED, unit=1 / 8),
    IntegerBlock("IQ1_M", (2, 1), splits.iq1_m, group_size=16, signed=True, codebook=_SHIFTED, unit=1 / 8),
    IntegerBlock("Q1_0", (1,), splits.q1_0, signed=True, codebook=_SIGNS, has_factors=False),
    IntegerBlock("Q2_0", (2,), splits.q2_0, signed=True, codebook=_TERNARY, has_factors=False),
    IntegerBlock("TQ1_0", (2,), splits.tq1_0, signed=True, codebook=_TERNARY, has_factors=False),
    IntegerBlock("TQ2_0", (2,), splits.tq2_0, signed=True, codebook=_TERNARY, has_factors=False),
)
BLOCKS = {each.name: each for each in _TYPES}


BAND = 64  # tiles whose high bits lie side by side, before their low bits: few prefetches go beyond the end
MIDDLE = ((1 << LOW_BITS) - 1) / 2  # of the low bits: no q is further from its high bits and this
_HIGH = IntegerBlock(
    "Q8_0 high", (4, 1), splits.q8_0_high, center=16, unit=float(1 << LOW_BITS), offset=MIDDLE / (1 << LOW_BITS),
)  # fmt: skip
_LOW = IntegerBlock("Q8_0 low", (2, 1), splits.q8_0_low, offset=-MIDDLE, before=5)
HALVED = IntegerBlock("Q8_0 halved", (8,), splits.plain, signed=True, halves=(_HIGH, _LOW))
"""Q8_0 in two planes, for a head that is read in two stages (`cpu/phases/estimate.py`): q is 8 · high + low − 128.

Without the low bits, 8 · (high − 16) + 3.5 is the best estimate of q; low − 3.5 is the difference.
"""
PACKINGS = BLOCKS | {HALVED.name: HALVED}
