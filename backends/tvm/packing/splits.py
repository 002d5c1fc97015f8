"""How blocks of GGUF's types are split into integers and their scales, for packing.

The text of each function begins with the formula of its type's values.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge.formats.blocks import NVFP4_GROUP, NVFP4_GROUPS, nvfp4_scales
from edge.records import dataclass

LOW_BITS = 3  # of Q8_0's q, apart from the high ones

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
    fields = np.ascontiguousarray(values).reshape(len(values), -1, 8 // bits, 4 * bits).view(np.uint32)
    packed = fields[:, :, 0].copy()
    for number in range(1, 8 // bits):  # of four bytes at once: no value reaches the next byte
        packed |= fields[:, :, number] << np.uint32(bits * number)
    found: Bytes = packed.view(np.uint8)
    return found


def plain(raw: Bytes) -> BlockParts:
    """Q4_0: d · (q − 8), q of 4 bits; the low half of byte i is value i, the high half value i + 16.

    Q8_0: d · q, q signed bytes. IQ4_NL: d · codebook[q], q in the order of Q4_0.
    """
    return BlockParts(raw[:, :, 2:], numbers_at(raw, 0, 1))


def mxfp4(raw: Bytes) -> BlockParts:
    """2^(e − 128) · codebook[q], q in the order of Q4_0, behind a byte e. The codebook: floats of 4 bits, doubled."""
    return BlockParts(raw[:, :, 1:], raw[:, :, :1])


def nvfp4(raw: Bytes) -> BlockParts:
    """d / 1024 · f · codebook[q], q in the order of Q4_0 among 16 values, whose s in E4M3 is d / 1024 · f.

    d is a power of two, f a signed byte. None of 4 scales above 1/8 of their largest is rounded by that.
    """
    scales = nvfp4_scales(raw)
    most = np.maximum(scales.max(axis=-1, keepdims=True), np.float32(2**-10))
    unit = np.exp2(np.ceil(np.log2(most / np.float32(127))))
    d, factors = (unit * 1024).astype(np.float16), np.rint(scales / unit).astype(np.uint8)
    return BlockParts(plane(bits_of(raw[:, :, NVFP4_GROUPS:], 4, NVFP4_GROUP // 2), 4), d.view(np.uint16), factors)


def q4_1(raw: Bytes) -> BlockParts:
    """d · q + m, q in the order of Q4_0."""
    return BlockParts(raw[:, :, 4:], numbers_at(raw, 0, 2))


def q5_0(raw: Bytes) -> BlockParts:
    """d · (q − 16), q of 5 bits: a word with the highest bits, the others in the order of Q4_0."""
    return BlockParts(_fives(raw[:, :, 2:]), numbers_at(raw, 0, 1))


def q5_1(raw: Bytes) -> BlockParts:
    """d · q + m, q in the order of Q5_0."""
    return BlockParts(_fives(raw[:, :, 4:]), numbers_at(raw, 0, 2))


def _fives(raw: Bytes) -> Bytes:
    """Quants of 5 bits from the word and the nibbles."""
    high = np.unpackbits(raw[:, :, :4], axis=-1, bitorder="little")
    return np.concatenate([raw[:, :, 4:], plane(high, 1)], axis=-1)


def q2_k(raw: Bytes) -> BlockParts:
    """d · s · q − dmin · m, q of 2 bits, s and m of 4 bits for every 16 values.

    32 bytes hold 128 values. A byte of scales has s in its low half.
    """
    return BlockParts(plane(bits_of(raw[:, :, 16:80], 2, 32), 2), _d_and_dmin(raw, 80), raw[:, :, :16])


def q3_k(raw: Bytes) -> BlockParts:
    """d · (s − 32) · (q − 4), q of 3 bits, s of 6 bits for every 16 values.

    The scales' low 4 bits are 8 bytes, their high 2 bits 4 more; s − 32 is stored, a signed byte.
    """
    high, low = plane(bits_of(raw[:, :, :32], 1, 32), 1), plane(bits_of(raw[:, :, 32:96], 2, 32), 2)
    scales = bits_of(raw[:, :, 96:104], 4, 8) | bits_of(raw[:, :, 104:108], 2, 4) << 4
    return BlockParts(np.concatenate([low, high], axis=-1), numbers_at(raw, 108, 1), scales - np.uint8(32))


def q4_k(raw: Bytes) -> BlockParts:
    """d · s · q − dmin · m, q of 4 bits, s and m of 6 bits for each of 8 parts.

    32 bytes hold two parts, one in the low halves.
    """
    return BlockParts(plane(bits_of(raw[:, :, 16:], 4, 32), 4), _d_and_dmin(raw, 0), _factors(raw[:, :, 4:16]))


def q5_k(raw: Bytes) -> BlockParts:
    """Like Q4_K, with q of 5 bits: 32 bytes hold the highest bits, one bit of each byte per part."""
    high, low = plane(bits_of(raw[:, :, 16:48], 1, 32), 1), plane(bits_of(raw[:, :, 48:], 4, 32), 4)
    return BlockParts(np.concatenate([low, high], axis=-1), _d_and_dmin(raw, 0), _factors(raw[:, :, 4:16]))


def q6_k(raw: Bytes) -> BlockParts:
    """d · s · (q − 32), q of 6 bits, a signed byte s for every 16 values.

    64 bytes hold the low 4 bits of 128 values, 32 others their high 2 bits.
    """
    low, high = plane(bits_of(raw[:, :, :128], 4, 64), 4), plane(bits_of(raw[:, :, 128:192], 2, 32), 2)
    return BlockParts(np.concatenate([low, high], axis=-1), numbers_at(raw, 208, 1), raw[:, :, 192:208])


def iq4_xs(raw: Bytes) -> BlockParts:
    """d · (s − 32) · codebook[q], q of each part in the order of Q4_0, s of 6 bits for each of 8 parts.

    A word has the high 2 bits of all s, behind d; 4 bytes have their low 4 bits.
    """
    high = bits_of(raw[:, :, 2:4], 2, 1)
    scales = bits_of(raw[:, :, 4:8], 4, 1) | high << 4
    quants = raw[:, :, 8:].reshape(len(raw), -1, 16)
    return BlockParts(quants, numbers_at(raw, 0, 1), _only_scales(scales - np.uint8(32)))


def iq3_s(raw: Bytes) -> BlockParts:
    """d · (1 + 2 s) · ±level, s of 4 bits for each of 8 parts; a number of 9 bits is 4 levels of a table, 1 … 15.

    The numbers' low bytes come first, then their high bits, then signs, then s.
    """
    high = np.unpackbits(raw[:, :, 66:74], axis=-1, bitorder="little").astype(np.uint16)
    signs = np.unpackbits(raw[:, :, 74:106], axis=-1, bitorder="little")
    codes = _levels("IQ3_S", raw[:, :, 2:66] | high << 8) | signs << np.uint8(3)
    return BlockParts(plane(codes, 4), numbers_at(raw, 0, 1), _only_scales(_odd(bits_of(raw[:, :, 106:110], 4, 1))))


def iq3_xxs(raw: Bytes) -> BlockParts:
    """d / 4 · (1 + 2 s) · ±level, a byte is 4 levels of a table. Signs and s are words behind the bytes."""
    signs, scales = _words(raw[:, :, 66:98])
    codes = _levels("IQ3_XXS", raw[:, :, 2:66]) | signs << np.uint8(3)
    return BlockParts(plane(codes, 4), numbers_at(raw, 0, 1), _only_scales(scales))


def iq2_xxs(raw: Bytes) -> BlockParts:
    """d / 8 · (1 + 2 s) · ±level, for each of 8 parts: 4 bytes, each 8 levels of a table, and a word of signs and s."""
    rows, blocks, _ = raw.shape
    parts = raw[:, :, 2:].reshape(rows, blocks, 8, 2, 4)
    numbers, words = (parts[:, :, :, which].reshape(rows, blocks, -1) for which in (0, 1))
    signs, scales = _words(words)
    return BlockParts(_threes(_levels("IQ2_XXS", numbers), signs), numbers_at(raw, 0, 1), _only_scales(scales))


def iq2_xs(raw: Bytes) -> BlockParts:
    """Like IQ2_XXS, in numbers of 16 bits: 9 of 8 levels, 7 of their signs; s of 4 bits for every 16 values."""
    numbers = numbers_at(raw, 2, 32)
    codes = _threes(_levels("IQ2_XS", numbers & np.uint16(511)), _even_signs(numbers >> np.uint16(9)))
    return BlockParts(codes, numbers_at(raw, 0, 1), _odd(bits_of(raw[:, :, 66:], 4, 1)))


def iq2_s(raw: Bytes) -> BlockParts:
    """Like IQ2_XS, with numbers of 10 bits and signs apart: low bytes, signs, high bits, s."""
    numbers = raw[:, :, 2:34] | bits_of(raw[:, :, 66:74], 2, 1).astype(np.uint16) << 8
    signs = np.unpackbits(raw[:, :, 34:66], axis=-1, bitorder="little")
    return BlockParts(
        _threes(_levels("IQ2_S", numbers), signs), numbers_at(raw, 0, 1), _odd(bits_of(raw[:, :, 74:], 4, 1))
    )


def iq1_s(raw: Bytes) -> BlockParts:
    """d / 8 · (1 + 2 s) · (8 level ± 1), levels −1, 0, 1; a number of 11 bits is 8 levels of a table.

    The numbers' low bytes come first. For each of 8 parts, 16 bits have their high ones, then s of 3, then the sign.
    """
    high = numbers_at(raw, 34, 8)[..., None] >> np.array([0, 3, 6, 9], np.uint16) & np.uint16(7)
    last = numbers_at(raw, 34, 8) >> np.uint16(12)
    levels = _levels("IQ1_S", raw[:, :, 2:34] | high.reshape(*raw.shape[:2], -1) << np.uint16(8))
    signs = np.repeat((last >> np.uint16(3)).astype(np.uint8), 32, axis=-1)  # of a part's values
    scales = _odd(last.astype(np.uint8) & np.uint8(7))
    return BlockParts(_threes(levels, signs), numbers_at(raw, 0, 1), _only_scales(scales))


def iq1_m(raw: Bytes) -> BlockParts:
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


def q1_0(raw: Bytes) -> BlockParts:
    """±d: a bit for each value, 1 for +."""
    return BlockParts(plane(bits_of(raw[:, :, 2:], 1, 1), 1), numbers_at(raw, 0, 1))


def q2_0(raw: Bytes) -> BlockParts:
    """d · (q − 1), q of 2 bits, four neighbours in a byte."""
    return BlockParts(plane(bits_of(raw[:, :, 2:], 2, 1), 2), numbers_at(raw, 0, 1))


def tq2_0(raw: Bytes) -> BlockParts:
    """d · (q − 1), q of 2 bits in the order of Q2_K."""
    return BlockParts(plane(bits_of(raw[:, :, :64], 2, 32), 2), numbers_at(raw, 64, 1))


def tq1_0(raw: Bytes) -> BlockParts:
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


def q8_0_high(raw: Bytes) -> BlockParts:
    """The high 5 bits of Q8_0's q + 128."""
    quants = (raw[:, :, 2:] ^ np.uint8(0x80)) >> np.uint8(LOW_BITS)
    return BlockParts(
        np.concatenate([plane(quants & np.uint8(15), 4), plane(quants >> np.uint8(4), 1)], axis=-1),
        numbers_at(raw, 0, 1),
    )


def q8_0_low(raw: Bytes) -> BlockParts:
    """The low 3 bits of Q8_0's q."""
    quants = raw[:, :, 2:] & np.uint8((1 << LOW_BITS) - 1)
    return BlockParts(
        np.concatenate([plane(quants & np.uint8(3), 2), plane(quants >> np.uint8(2), 1)], axis=-1),
        numbers_at(raw, 0, 1),
    )
