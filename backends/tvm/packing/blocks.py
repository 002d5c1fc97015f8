"""GGUF's block types for the native engine, and their packing for its kernels.

Rows of a matrix are packed in tiles of 16, one row per lane. Within a tile, 64 bytes hold 4 consecutive values of each
of the 16 rows, the operands of a dot-product instruction: 16 sums of 4 products at once. cpu/kernels/matmul.py reads
the packed bytes back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.formats.blocks import FP4, IQ4_NL, NVFP4_GROUP, NVFP4_GROUPS, block_size, nbytes, nvfp4_scales
from edge.records import dataclass

TILE = 16  # rows of a tile
PART = 32  # values that the kernel multiplies at a time, and for which activations have one scale

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class BlockParts:
    """GGUF blocks, split into their parts."""

    quants: Bytes  # [rows, parts, 4 per bit]
    # float16 as uint16 [rows, blocks, 1 or 2]: d and the minimum's; or exponents, uint8 [rows, blocks, 1]
    numbers: NDArray[np.uint16] | Bytes
    factors: Bytes | None = None  # of super-blocks: [rows, blocks, 2 per part]

    def times(self, factor: float) -> BlockParts:
        """The parts with their float16 numbers multiplied."""
        if factor == 1:
            return self
        numbers = (self.numbers.view(np.float16).astype(np.float32) * np.float32(factor)).astype(np.float16)
        return replace(self, numbers=numbers.view(np.uint16))


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
        fours = split.quants.reshape(rows // TILE, TILE, parts, count // 4, 4).transpose(0, 2, 3, 1, 4)
        scales = [_by_lanes(each) for each in (split.numbers, split.factors) if each is not None]
        return np.ascontiguousarray(fours), np.concatenate(scales, axis=-1)

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


def numbers_at(raw: Bytes, start: int, count: int) -> NDArray[np.uint16]:
    """The `count` float16 numbers from byte `start` of each block, as uint16 [rows, blocks, count]."""
    return np.ascontiguousarray(raw[:, :, start : start + 2 * count]).view("<u2")


def bits_of(raw: Bytes, bits: int, run: int) -> Bytes:
    """Split bytes [rows, blocks, n] into fields of `bits` bits, [rows, blocks, 8 n / bits].

    In every run of `run` bytes, the lowest fields of all bytes come first, then the next ones.
    """
    rows, blocks, _ = raw.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    fields: Bytes = raw.reshape(rows, blocks, -1, 1, run) >> shifts & np.uint8((1 << bits) - 1)
    return fields.reshape(rows, blocks, -1)


def plane(values: Bytes, bits: int) -> Bytes:
    """Pack values of `bits` bits, [rows, blocks, n], into bytes [rows, parts, 4 · bits].

    Byte i of a part has value i lowest, then value i + 4 · bits, and so on: for 4 bits, as in a block of Q4_0.
    """
    rows, _, _ = values.shape
    fields = values.reshape(rows, -1, 8 // bits, 4 * bits)
    packed: Bytes = np.bitwise_or.reduce(fields << np.arange(0, 8, bits, dtype=np.uint8)[:, None], axis=2)
    return packed


def growth(block: Block) -> float:
    """Packed bytes / bytes in the file."""
    return sum(block.packed_bytes(TILE, block.values)) / (TILE * block.raw_bytes)


def _by_lanes(numbers: NDArray[Any]) -> Bytes:
    """Rearrange numbers [rows, blocks, n] to bytes [rows / 16, blocks, bytes], with each number of 16 rows side by
    side."""
    rows, blocks, count = numbers.shape
    tiles = np.ascontiguousarray(numbers.reshape(rows // TILE, TILE, blocks, count).transpose(0, 2, 3, 1))
    return tiles.view(np.uint8).reshape(rows // TILE, blocks, -1)


# Block types: how each is split. The formula of its values comes first.


def _split_plain(raw: Bytes) -> BlockParts:
    """Q4_0: d · (q − 8), q of 4 bits; the low half of byte i is value i, the high half value i + 16.

    Q8_0: d · q, q signed bytes. IQ4_NL: d · codebook[q], q in the order of Q4_0.
    """
    return BlockParts(raw[:, :, 2:], numbers_at(raw, 0, 1))


def _split_mxfp4(raw: Bytes) -> BlockParts:
    """2^(e − 128) · codebook[q], q in the order of Q4_0, behind a byte e. The codebook: floats of 4 bits, doubled."""
    return BlockParts(raw[:, :, 1:], raw[:, :, :1])


def _split_nvfp4(raw: Bytes) -> BlockParts:
    """d / 1024 · f · codebook[q], q in the order of Q4_0 among 16 values, whose s in E4M3 is d / 1024 · f.

    d is a power of two, f a signed byte. None of 4 scales above 1/8 of their largest is rounded by that.
    """
    scales = nvfp4_scales(raw)
    most = np.maximum(scales.max(axis=-1, keepdims=True), np.float32(2**-10))
    unit = np.exp2(np.ceil(np.log2(most / np.float32(127))))
    d, factors = (unit * 1024).astype(np.float16), np.rint(scales / unit).astype(np.uint8)
    return BlockParts(plane(bits_of(raw[:, :, NVFP4_GROUPS:], 4, NVFP4_GROUP // 2), 4), d.view(np.uint16), factors)


def _split_q4_1(raw: Bytes) -> BlockParts:
    """d · q + m, q in the order of Q4_0."""
    return BlockParts(raw[:, :, 4:], numbers_at(raw, 0, 2))


def _split_q5_0(raw: Bytes) -> BlockParts:
    """d · (q − 16), q of 5 bits: a word with the highest bits, the others in the order of Q4_0."""
    return BlockParts(_fives(raw[:, :, 2:]), numbers_at(raw, 0, 1))


def _split_q5_1(raw: Bytes) -> BlockParts:
    """d · q + m, q in the order of Q5_0."""
    return BlockParts(_fives(raw[:, :, 4:]), numbers_at(raw, 0, 2))


def _fives(raw: Bytes) -> Bytes:
    """Quants of 5 bits from the word and the nibbles."""
    high = np.unpackbits(raw[:, :, :4], axis=-1, bitorder="little")
    return np.concatenate([raw[:, :, 4:], plane(high, 1)], axis=-1)


def _split_q2_k(raw: Bytes) -> BlockParts:
    """d · s · q − dmin · m, q of 2 bits, s and m of 4 bits for every 16 values.

    32 bytes hold 128 values. A byte of scales has s in its low half.
    """
    return BlockParts(plane(bits_of(raw[:, :, 16:80], 2, 32), 2), _d_and_dmin(raw, 80), raw[:, :, :16])


def _split_q3_k(raw: Bytes) -> BlockParts:
    """d · (s − 32) · (q − 4), q of 3 bits, s of 6 bits for every 16 values.

    The scales' low 4 bits are 8 bytes, their high 2 bits 4 more; s − 32 is stored, a signed byte.
    """
    high, low = plane(bits_of(raw[:, :, :32], 1, 32), 1), plane(bits_of(raw[:, :, 32:96], 2, 32), 2)
    scales = bits_of(raw[:, :, 96:104], 4, 8) | bits_of(raw[:, :, 104:108], 2, 4) << 4
    return BlockParts(np.concatenate([low, high], axis=-1), numbers_at(raw, 108, 1), scales - np.uint8(32))


def _split_q4_k(raw: Bytes) -> BlockParts:
    """d · s · q − dmin · m, q of 4 bits, s and m of 6 bits for each of 8 parts.

    32 bytes hold two parts, one in the low halves.
    """
    return BlockParts(plane(bits_of(raw[:, :, 16:], 4, 32), 4), _d_and_dmin(raw, 0), _factors(raw[:, :, 4:16]))


def _split_q5_k(raw: Bytes) -> BlockParts:
    """Like Q4_K, with q of 5 bits: 32 bytes hold the highest bits, one bit of each byte per part."""
    high, low = plane(bits_of(raw[:, :, 16:48], 1, 32), 1), plane(bits_of(raw[:, :, 48:], 4, 32), 4)
    return BlockParts(np.concatenate([low, high], axis=-1), _d_and_dmin(raw, 0), _factors(raw[:, :, 4:16]))


def _split_q6_k(raw: Bytes) -> BlockParts:
    """d · s · (q − 32), q of 6 bits, a signed byte s for every 16 values.

    64 bytes hold the low 4 bits of 128 values, 32 others their high 2 bits.
    """
    low, high = plane(bits_of(raw[:, :, :128], 4, 64), 4), plane(bits_of(raw[:, :, 128:192], 2, 32), 2)
    return BlockParts(np.concatenate([low, high], axis=-1), numbers_at(raw, 208, 1), raw[:, :, 192:208])


def _split_iq4_xs(raw: Bytes) -> BlockParts:
    """d · (s − 32) · codebook[q], q of each part in the order of Q4_0, s of 6 bits for each of 8 parts.

    A word has the high 2 bits of all s, behind d; 4 bytes have their low 4 bits.
    """
    high = bits_of(raw[:, :, 2:4], 2, 1)
    scales = bits_of(raw[:, :, 4:8], 4, 1) | high << 4
    quants = raw[:, :, 8:].reshape(len(raw), -1, 16)
    return BlockParts(quants, numbers_at(raw, 0, 1), _only_scales(scales - np.uint8(32)))


def _split_iq3_s(raw: Bytes) -> BlockParts:
    """d · (1 + 2 s) · ±level, s of 4 bits for each of 8 parts; a number of 9 bits is 4 levels of a table, 1 … 15.

    The numbers' low bytes come first, then their high bits, then signs, then s.
    """
    high = np.unpackbits(raw[:, :, 66:74], axis=-1, bitorder="little").astype(np.uint16)
    signs = np.unpackbits(raw[:, :, 74:106], axis=-1, bitorder="little")
    codes = _levels("IQ3_S", raw[:, :, 2:66] | high << 8) | signs << np.uint8(3)
    return BlockParts(plane(codes, 4), numbers_at(raw, 0, 1), _only_scales(_odd(bits_of(raw[:, :, 106:110], 4, 1))))


def _split_iq3_xxs(raw: Bytes) -> BlockParts:
    """d / 4 · (1 + 2 s) · ±level, a byte is 4 levels of a table. Signs and s are words behind the bytes."""
    signs, scales = _words(raw[:, :, 66:98])
    codes = _levels("IQ3_XXS", raw[:, :, 2:66]) | signs << np.uint8(3)
    return BlockParts(plane(codes, 4), numbers_at(raw, 0, 1), _only_scales(scales))


def _split_iq2_xxs(raw: Bytes) -> BlockParts:
    """d / 8 · (1 + 2 s) · ±level, for each of 8 parts: 4 bytes, each 8 levels of a table, and a word of signs and s."""
    rows, blocks, _ = raw.shape
    parts = raw[:, :, 2:].reshape(rows, blocks, 8, 2, 4)
    numbers, words = (parts[:, :, :, which].reshape(rows, blocks, -1) for which in (0, 1))
    signs, scales = _words(words)
    return BlockParts(_threes(_levels("IQ2_XXS", numbers), signs), numbers_at(raw, 0, 1), _only_scales(scales))


def _split_iq2_xs(raw: Bytes) -> BlockParts:
    """Like IQ2_XXS, in numbers of 16 bits: 9 of 8 levels, 7 of their signs; s of 4 bits for every 16 values."""
    numbers = numbers_at(raw, 2, 32)
    codes = _threes(_levels("IQ2_XS", numbers & np.uint16(511)), _even_signs(numbers >> np.uint16(9)))
    return BlockParts(codes, numbers_at(raw, 0, 1), _odd(bits_of(raw[:, :, 66:], 4, 1)))


def _split_iq2_s(raw: Bytes) -> BlockParts:
    """Like IQ2_XS, with numbers of 10 bits and signs apart: low bytes, signs, high bits, s."""
    numbers = raw[:, :, 2:34] | bits_of(raw[:, :, 66:74], 2, 1).astype(np.uint16) << 8
    signs = np.unpackbits(raw[:, :, 34:66], axis=-1, bitorder="little")
    return BlockParts(
        _threes(_levels("IQ2_S", numbers), signs), numbers_at(raw, 0, 1), _odd(bits_of(raw[:, :, 74:], 4, 1))
    )


def _split_iq1_s(raw: Bytes) -> BlockParts:
    """d / 8 · (1 + 2 s) · (8 level ± 1), levels −1, 0, 1; a number of 11 bits is 8 levels of a table.

    The numbers' low bytes come first. For each of 8 parts, 16 bits have their high ones, then s of 3, then the sign.
    """
    high = numbers_at(raw, 34, 8)[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    last = numbers_at(raw, 34, 8) >> np.uint16(12)
    levels = _levels("IQ1_S", raw[:, :, 2:34] | high.reshape(*raw.shape[:2], -1) << np.uint16(8))
    signs = np.repeat((last >> np.uint16(3)).astype(np.uint8), PART, axis=-1)
    scales = _odd(last.astype(np.uint8) & np.uint8(7))
    return BlockParts(_threes(levels, signs), numbers_at(raw, 0, 1), _only_scales(scales))


def _split_iq1_m(raw: Bytes) -> BlockParts:
    """Like IQ1_S, with a sign for every 8 values and s for every 16.

    Low bytes of the numbers; 4 bits for each with its high ones and the sign; 4 words of 16 bits, each with s of 3 bits
    for 64 values and, above them, 4 bits of d.
    """
    rows, blocks, _ = raw.shape
    high = bits_of(raw[:, :, 32:48], 4, 1)
    levels = _levels("IQ1_S", raw[:, :, :32] | (high & np.uint8(7)).astype(np.uint16) << 8)
    words = numbers_at(raw, 48, 4)
    d = np.bitwise_or.reduce(words >> np.uint16(12) << np.array([0, 4, 8, 12], np.uint16), axis=-1, keepdims=True)
    scales = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)).astype(np.uint8) & np.uint8(7)
    codes = _threes(levels, np.repeat(high >> np.uint8(3), 8, axis=-1))
    return BlockParts(codes, d, _odd(scales.reshape(rows, blocks, -1)))


def _split_q1_0(raw: Bytes) -> BlockParts:
    """±d: a bit for each value, 1 for +."""
    return BlockParts(plane(bits_of(raw[:, :, 2:], 1, 1), 1), numbers_at(raw, 0, 1))


def _split_q2_0(raw: Bytes) -> BlockParts:
    """d · (q − 1), q of 2 bits, four neighbours in a byte."""
    return BlockParts(plane(bits_of(raw[:, :, 2:], 2, 1), 2), numbers_at(raw, 0, 1))


def _split_tq2_0(raw: Bytes) -> BlockParts:
    """d · (q − 1), q of 2 bits in the order of Q2_K."""
    return BlockParts(plane(bits_of(raw[:, :, :64], 2, 32), 2), numbers_at(raw, 64, 1))


def _split_tq1_0(raw: Bytes) -> BlockParts:
    """d · (q − 1), q of 0, 1, 2: five to a byte, ⌈256 / 243 · their number⌉ in base 3, the first q its highest digit.

    In runs of 32, 16 and 4 bytes, the highest digits of all bytes come first; the last run has four to a byte.
    """
    rows, blocks, _ = raw.shape
    found = []
    for first, run, digits in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        powers = np.array([3**digit for digit in range(digits)], np.uint8)[:, None]
        rest = (raw[:, :, None, first : first + run] * powers).astype(np.uint16)
        found.append((rest * np.uint16(3) >> 8).astype(np.uint8).reshape(rows, blocks, -1))
    return BlockParts(plane(np.concatenate(found, axis=-1), 2), numbers_at(raw, 52, 1))


def _only_scales(scales: Bytes) -> Bytes:
    """Factors [rows, blocks, 2 per part] from signed s of each part."""
    return np.stack([scales, np.zeros_like(scales)], axis=-1).reshape(*scales.shape[:2], -1)


def _odd(scales: Bytes) -> Bytes:
    """1 + 2 s."""
    odd: Bytes = scales << np.uint8(1) | np.uint8(1)
    return odd


def _threes(levels: Bytes, signs: Bytes) -> Bytes:
    """Codes of 3 bits: of a level 0 … 2, and its sign."""
    codes: Bytes = np.concatenate([plane(levels, 2), plane(signs, 1)], axis=-1)
    return codes


def _words(raw: Bytes) -> tuple[Bytes, Bytes]:
    """Signs [rows, blocks, 256] and 1 + 2 s of each part, from words with 7 bits for each 8 signs, and s above them."""
    words = np.ascontiguousarray(raw).view("<u4")
    fields = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & np.uint32(127)
    return _even_signs(fields.reshape(*raw.shape[:2], -1)), _odd((words >> np.uint32(28)).astype(np.uint8))


def _even_signs(numbers: NDArray[Any]) -> Bytes:
    """8 signs for each number of 7 bits [rows, blocks, n]: the last makes their sum even."""
    signs = np.unpackbits(numbers.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    signs[..., 7] = np.bitwise_xor.reduce(signs, axis=-1)
    return signs.reshape(*numbers.shape[:2], -1)


def _levels(kind: str, numbers: NDArray[Any]) -> Bytes:
    """Decode numbers [rows, blocks, n] to levels, as indices into the table's sorted levels."""
    found: Bytes = _grid(kind)[numbers].reshape(*numbers.shape[:2], -1)
    return found


@lru_cache
def _grid(kind: str) -> Bytes:
    """uint8 [numbers, levels of each]."""
    from gguf import quants  # imported late: gguf costs 6 MB

    table = getattr(quants, kind)
    table.init_grid()
    found: Bytes = np.searchsorted(table.grid_map, table.grid.reshape(-1, table.grid.shape[-1])).astype(np.uint8)
    return found


def _d_and_dmin(raw: Bytes, start: int) -> NDArray[np.uint16]:
    """d and −dmin, from byte `start`."""
    return numbers_at(raw, start, 2) ^ np.array([0, 0x8000], np.uint16)


def _factors(raw: Bytes) -> Bytes:
    """s and m of each part alternately, from the 12 bytes of Q4_K and Q5_K.

    Those of the first 4 parts are the low 6 bits of bytes 0 … 3 and 4 … 7; the high 2 bits there belong to those of the
    last 4, whose lower halves are the nibbles of bytes 8 … 11.
    """
    rows, blocks, _ = raw.shape
    first, last = (each.reshape(rows, blocks, 2, 4) for each in (raw[:, :, :8], bits_of(raw[:, :, 8:], 4, 4)))
    both = np.concatenate([first & np.uint8(0x3F), last | first >> np.uint8(2) & np.uint8(0x30)], axis=-1)
    factors: Bytes = both.swapaxes(2, 3).reshape(rows, blocks, 16)
    return factors


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
    IntegerBlock("Q4_0", (4,), _split_plain, center=8),
    IntegerBlock("Q4_1", (4,), _split_q4_1, has_minimum=True),
    IntegerBlock("Q5_0", (4, 1), _split_q5_0, center=16),
    IntegerBlock("Q5_1", (4, 1), _split_q5_1, has_minimum=True),
    IntegerBlock("Q8_0", (8,), _split_plain, signed=True),
    IntegerBlock("IQ4_NL", (4,), _split_plain, signed=True, codebook=IQ4_NL),
    IntegerBlock("MXFP4", (4,), _split_mxfp4, signed=True, codebook=FP4, exponents=True),
    IntegerBlock("NVFP4", (4,), _split_nvfp4, group_size=16, signed=True, codebook=FP4, unit=1 / 1024),
    IntegerBlock("Q2_K", (2,), _split_q2_k, group_size=16, has_minimum=True),
    IntegerBlock("Q3_K", (2, 1), _split_q3_k, center=4, group_size=16),
    IntegerBlock("Q4_K", (4,), _split_q4_k, has_minimum=True),
    IntegerBlock("Q5_K", (4, 1), _split_q5_k, has_minimum=True),
    IntegerBlock("Q6_K", (4, 2), _split_q6_k, center=32, group_size=16),
    IntegerBlock("IQ4_XS", (4,), _split_iq4_xs, signed=True, codebook=IQ4_NL),
    IntegerBlock("IQ3_S", (4,), _split_iq3_s, signed=True, codebook=_ODD),
    IntegerBlock("IQ3_XXS", (4,), _split_iq3_xxs, signed=True, codebook=_EIGHT, unit=1 / 4),
    IntegerBlock("IQ2_XXS", (2, 1), _split_iq2_xxs, signed=True, codebook=_THREE, unit=1 / 8),
    IntegerBlock("IQ2_XS", (2, 1), _split_iq2_xs, group_size=16, signed=True, codebook=_THREE, unit=1 / 8),
    IntegerBlock("IQ2_S", (2, 1), _split_iq2_s, group_size=16, signed=True, codebook=_THREE, unit=1 / 8),
    IntegerBlock("IQ1_S", (2, 1), _split_iq1_s, signed=True, codebook=_SHIFTED, unit=1 / 8),
    IntegerBlock("IQ1_M", (2, 1), _split_iq1_m, group_size=16, signed=True, codebook=_SHIFTED, unit=1 / 8),
    IntegerBlock("Q1_0", (1,), _split_q1_0, signed=True, codebook=_SIGNS, has_factors=False),
    IntegerBlock("Q2_0", (2,), _split_q2_0, signed=True, codebook=_TERNARY, has_factors=False),
    IntegerBlock("TQ1_0", (2,), _split_tq1_0, signed=True, codebook=_TERNARY, has_factors=False),
    IntegerBlock("TQ2_0", (2,), _split_tq2_0, signed=True, codebook=_TERNARY, has_factors=False),
)
BLOCKS = {each.name: each for each in _TYPES}


def _split_high(raw: Bytes) -> BlockParts:
    """The high 5 bits of Q8_0's q + 128."""
    quants = (raw[:, :, 2:] ^ np.uint8(0x80)) >> np.uint8(LOW_BITS)
    return BlockParts(
        np.concatenate([plane(quants & np.uint8(15), 4), plane(quants >> np.uint8(4), 1)], axis=-1),
        numbers_at(raw, 0, 1),
    )


def _split_low(raw: Bytes) -> BlockParts:
    """The low 3 bits of Q8_0's q."""
    quants = raw[:, :, 2:] & np.uint8((1 << LOW_BITS) - 1)
    return BlockParts(
        np.concatenate([plane(quants & np.uint8(3), 2), plane(quants >> np.uint8(2), 1)], axis=-1),
        numbers_at(raw, 0, 1),
    )


BAND = 64  # tiles whose high bits lie side by side, before their low bits: few prefetches go beyond the end
LOW_BITS = 3
MIDDLE = ((1 << LOW_BITS) - 1) / 2  # of the low bits: no q is further from its high bits and this
_HIGH = IntegerBlock(
    "Q8_0 high", (4, 1), _split_high, center=16, unit=float(1 << LOW_BITS), offset=MIDDLE / (1 << LOW_BITS),
)  # fmt: skip
_LOW = IntegerBlock("Q8_0 low", (2, 1), _split_low, offset=-MIDDLE, before=5)
HALVED = IntegerBlock("Q8_0 halved", (8,), _split_plain, signed=True, halves=(_HIGH, _LOW))
"""Q8_0 in two planes, for a head that is read in two stages (`cpu/phases/estimate.py`): q is 8 · high + low − 128.

Without the low bits, 8 · (high − 16) + 3.5 is the best estimate of q; low − 3.5 is the difference.
"""
PACKINGS = BLOCKS | {HALVED.name: HALVED}
