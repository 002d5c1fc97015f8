"""Block types of weights: their sizes, the values that a block can hold, and its bytes.

This is the one definition of sizes, code tables and layouts for readers, converters and engines. Bytes are those of
llama.cpp and the `gguf` package. Damaged scales give non-finite values without NumPy's warnings; callers refuse them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from edge.errors import UnsupportedError
from edge.formats.small_floats import E4M3
from edge.records import dataclass
from edge.types import AnyArray, FloatArray


class BlockType(NamedTuple):
    """A tensor type of ggml."""

    name: str
    values: int  # per block
    nbytes: int  # per block
    file_type: int | None = None  # llama.cpp's number for files in this type, `general.file_type`


BLOCK_TYPES: dict[int, BlockType] = {
    0: BlockType("F32", 1, 4, 0), 1: BlockType("F16", 1, 2, 1), 2: BlockType("Q4_0", 32, 18, 2),
    3: BlockType("Q4_1", 32, 20, 3), 6: BlockType("Q5_0", 32, 22, 8), 7: BlockType("Q5_1", 32, 24, 9),
    8: BlockType("Q8_0", 32, 34, 7), 9: BlockType("Q8_1", 32, 40), 10: BlockType("Q2_K", 256, 84, 10),
    11: BlockType("Q3_K", 256, 110, 12), 12: BlockType("Q4_K", 256, 144, 15), 13: BlockType("Q5_K", 256, 176, 17),
    14: BlockType("Q6_K", 256, 210, 18), 15: BlockType("Q8_K", 256, 292), 16: BlockType("IQ2_XXS", 256, 66, 19),
    17: BlockType("IQ2_XS", 256, 74, 20), 18: BlockType("IQ3_XXS", 256, 98, 23), 19: BlockType("IQ1_S", 256, 50, 24),
    20: BlockType("IQ4_NL", 32, 18, 25), 21: BlockType("IQ3_S", 256, 110, 26), 22: BlockType("IQ2_S", 256, 82, 28),
    23: BlockType("IQ4_XS", 256, 136, 30), 24: BlockType("I8", 1, 1), 25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4), 27: BlockType("I64", 1, 8), 28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56, 31), 30: BlockType("BF16", 1, 2, 32), 34: BlockType("TQ1_0", 256, 54, 36),
    35: BlockType("TQ2_0", 256, 66, 37), 39: BlockType("MXFP4", 32, 17), 40: BlockType("NVFP4", 64, 36, 39),
    41: BlockType("Q1_0", 128, 18, 40), 42: BlockType("Q2_0", 64, 18, 41),
}  # fmt: skip
TYPE_IDS = {each.name: index for index, each in BLOCK_TYPES.items()}
FILE_TYPES = {each.name: each.file_type for each in BLOCK_TYPES.values() if each.file_type is not None}
UNNAMED_FILE_TYPE = 1024  # llama.cpp's flag for "guessed", where a type has no number
FLOATS = ("F32", "F16", "BF16")
BLOCK = 32  # values that share a scale in types without super-blocks

IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # levels, by code
NVFP4_GROUPS, NVFP4_GROUP = 4, 16
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled, by code
_MIDDLES = [(low + high) / 2 for low, high in pairwise(IQ4_NL)]
_PLACES = 254  # half levels to either side of zero
_NEAREST_IQ4_NL = np.searchsorted(_MIDDLES, np.arange(-_PLACES, _PLACES + 1) / 2, side="right").astype(np.uint8)
_NEAREST_LEVELS = np.array(IQ4_NL, np.float32)[_NEAREST_IQ4_NL]


def block_size(kind: str) -> int:
    """Values per block. Raises UnsupportedError for types that GGUF does not have."""
    return BLOCK_TYPES[_type_id(kind)].values


def nbytes(kind: str, values: int) -> int:
    """Bytes of `values` values in whole blocks."""
    found = BLOCK_TYPES[_type_id(kind)]
    return values // found.values * found.nbytes


def bits_per_weight(kind: str) -> float:
    """Bits of a value, scales included. Raises UnsupportedError for types that GGUF does not have."""
    return 8 * nbytes(kind, block_size(kind)) / block_size(kind)


@np.errstate(all="ignore")
def dequantize(data: AnyArray, kind: str) -> FloatArray:
    """Convert uint8 [rows, bytes] to float32 [rows, n]; a view if the bytes are float32. Raises UnsupportedError."""
    if kind == "F32":
        return np.asarray(data.view(np.float32))
    if kind == "F16":
        return np.asarray(data.view(np.float16), np.float32)
    if kind in _OF_FEW_BITS:
        return _of_few_bits(data, kind)
    if kind == "NVFP4":
        return _nvfp4(data)
    from gguf.constants import GGMLQuantizationType  # imported late: gguf costs 6 MB that most commands save
    from gguf.quants import dequantize as from_bytes

    try:
        return np.asarray(from_bytes(data, GGMLQuantizationType(_type_id(kind))), np.float32)
    except NotImplementedError:
        raise UnsupportedError(f"{kind} weights cannot be read: quantize the model to another type") from None


_OF_FEW_BITS: dict[str, FloatArray] = {  # levels by code, after a float16 scale; gguf 0.19 does not read them
    "Q1_0": np.array([-1, 1], np.float32),
    "Q2_0": np.array([-1, 0, 1, 2], np.float32),
}


def _of_few_bits(data: AnyArray, kind: str) -> FloatArray:
    blocks, bits = data.reshape(*data.shape[:-1], -1, nbytes(kind, block_size(kind))), int(kind[1])
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    fields = blocks[..., 2:, None] >> np.arange(0, 8, bits, dtype=np.uint8) & np.uint8((1 << bits) - 1)
    values = _OF_FEW_BITS[kind][fields].reshape(*blocks.shape[:-1], -1) * scales
    return np.asarray(values.reshape(*data.shape[:-1], -1))


def _nvfp4(data: AnyArray) -> FloatArray:
    """Scales in E4M3, without a sign, of four groups of 16, then the groups' codes, low halves first."""
    blocks = data.reshape(*data.shape[:-1], -1, nbytes("NVFP4", NVFP4_GROUPS * NVFP4_GROUP))
    codes = _nibbles(blocks[..., NVFP4_GROUPS:].reshape(*blocks.shape[:-1], NVFP4_GROUPS, -1))
    values = np.array(FP4, np.float32)[codes] * nvfp4_scales(blocks)[..., None]
    return np.asarray(values.reshape(*data.shape[:-1], -1))


def nvfp4_scales(blocks: AnyArray) -> FloatArray:
    """The scales of doubled levels in blocks of NVFP4, uint8 [..., 36]: float32 [..., 4]."""
    return np.asarray(_UNSIGNED_E4M3[blocks[..., :NVFP4_GROUPS]] / 2, np.float32)


_UNSIGNED_E4M3 = np.nan_to_num(np.tile(E4M3[:128], 2))  # as llama.cpp reads bytes: NaN is 0, but for 255
_UNSIGNED_E4M3[255] = 480


@dataclass(frozen=True)
class Grid:
    """The values that a block can hold: scale · level + minimum, where a code of 4, 5 or 8 bits selects the level."""

    kind: str
    levels: FloatArray  # float32, ascending, indexed by code
    minima: bool = False  # blocks have a minimum, −scale · an integer, so that zero is on the grid
    uniform: bool = True  # levels are consecutive integers

    @property
    def bits(self) -> int:
        return int(len(self.levels) - 1).bit_length()

    @np.errstate(all="ignore")
    def codes(self, values: FloatArray, scales: FloatArray, minima: FloatArray | None = None) -> AnyArray:
        """Codes of the nearest levels, uint8; scales and minima have the shape of `values` or broadcast to it."""
        if self.uniform:
            return np.asarray(self.nearest(values, inverse(scales), minima) - self.levels[0], np.uint8)
        return _look_up(_NEAREST_IQ4_NL, values * inverse(scales))

    def nearest(self, values: FloatArray, inverses: FloatArray, minima: FloatArray | None = None) -> FloatArray:
        """The nearest levels, float32, for values in blocks with these `inverses` of scales."""
        x = np.asarray((values if minima is None else values - minima) * inverses)
        if not self.uniform:
            return np.asarray(_look_up(_NEAREST_LEVELS, x))
        np.rint(x, out=x)
        np.maximum(x, self.levels[0], out=x)
        return np.asarray(np.minimum(x, self.levels[-1], out=x))

    @np.errstate(all="ignore")
    def values(self, codes: AnyArray, scales: FloatArray, minima: FloatArray | None = None) -> FloatArray:
        """Decode codes, to float32."""
        levels = codes.astype(np.float32) + self.levels[0] if self.uniform else self.levels[codes]
        return np.asarray(levels * scales if minima is None else levels * scales + minima, np.float32)


def inverse(scales: FloatArray) -> FloatArray:
    """1 / scales, and 0 where a scale is 0, as in blocks of zeros."""
    return np.asarray(np.divide(np.float32(1), scales, out=np.zeros_like(scales, np.float32), where=scales != 0))


def _look_up(table: AnyArray, x: FloatArray) -> AnyArray:
    """The entries for x of a table that is indexed by half levels."""
    return np.asarray(table.take((x + x + np.float32(_PLACES)).astype(np.intp), mode="clip"))


_GRIDS = (
    Grid("Q4_0", np.arange(-8, 8, dtype=np.float32)),
    Grid("Q4_1", np.arange(16, dtype=np.float32), minima=True),
    Grid("Q5_0", np.arange(-16, 16, dtype=np.float32)),
    Grid("Q5_1", np.arange(32, dtype=np.float32), minima=True),
    Grid("Q8_0", np.arange(-127, 128, dtype=np.float32)),
    Grid("IQ4_NL", np.array(IQ4_NL, np.float32), uniform=False),
)
GRIDS = {grid.kind: grid for grid in _GRIDS}
PLAIN = (*FLOATS, *(grid.kind for grid in reversed(_GRIDS) if grid.uniform))  # rounded alike by all; the best first


def find_grid(kind: str) -> Grid:
    """The grid of a block type. Raises UnsupportedError for types without one."""
    try:
        return GRIDS[kind]
    except KeyError:
        raise UnsupportedError(f"methods that choose codes know {', '.join(GRIDS)}, not {kind}") from None


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix in blocks of 32."""

    grid: Grid
    codes: AnyArray  # uint8 [rows, columns]
    scales: FloatArray  # float32 [rows, blocks], representable in float16
    minima: FloatArray | None = None  # like scales; None: the grid has none

    @property
    def values(self) -> FloatArray:
        """The dequantized matrix, float32 [rows, columns]."""
        minima = None if self.minima is None else _spread(self.minima)
        return self.grid.values(self.codes, _spread(self.scales), minima)

    @property
    def data(self) -> AnyArray:
        """GGUF's bytes, uint8 [rows, bytes of a row]."""
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


@dataclass(frozen=True)
class Unpacked:
    """Unpacked blocks of 32: a value is scale · quant + minimum."""

    quants: AnyArray  # int8 [rows, blocks, 32]
    scales: FloatArray  # float32 [rows, blocks]
    minima: FloatArray | None = None  # float32 [rows, blocks]


@np.errstate(all="ignore")
def unpack(raw: AnyArray, kind: str) -> Unpacked:
    """Unpack rows, uint8 [rows, row bytes], of a type in GRIDS, Q4_K or MXFP4. Raises UnsupportedError."""
    if kind == "Q4_K":
        return _unpack_q4_k(raw)
    if kind == "MXFP4":
        blocks = raw.reshape(len(raw), -1, nbytes(kind, BLOCK))
        exponents = np.maximum(blocks[..., 0].astype(np.int32) - 1, 0)  # of 2^(byte − 128); tiny ones are 0
        return Unpacked(np.array(FP4, np.int8)[_nibbles(blocks[..., 1:])], (exponents << 23).view(np.float32))
    grid = find_grid(kind)
    blocks, count = raw.reshape(len(raw), -1, nbytes(kind, BLOCK)), 1 + grid.minima
    numbers = np.ascontiguousarray(blocks[..., : 2 * count]).view(np.float16).astype(np.float32)
    codes = blocks[..., 2 * count :]
    if grid.bits == 8:
        quants = codes.view(np.int8)
    else:
        high = 0 if grid.bits == 4 else np.unpackbits(codes[..., :4], axis=-1, bitorder="little") << 4
        levels = grid.levels.astype(np.int8)
        quants = levels[_nibbles(codes[..., -BLOCK // 2 :]) | high]
    return Unpacked(quants, numbers[..., 0], numbers[..., 1] if grid.minima else None)


def _unpack_q4_k(raw: AnyArray) -> Unpacked:
    """Unpack super-blocks of 256: 8 blocks whose scales and minima are integers, times two floats."""
    from gguf.quants import Q4_K

    supers = raw.reshape(-1, nbytes("Q4_K", block_size("Q4_K")))
    numbers = np.ascontiguousarray(supers[:, :4]).view(np.float16).astype(np.float32)
    scales, minima = (np.asarray(each, np.float32).reshape(-1, 8) for each in Q4_K.get_scale_min(supers[:, 4:16]))
    quants = _nibbles(supers[:, 16:].reshape(-1, 4, BLOCK))  # 64 weights in 32 bytes
    shape = (len(raw), -1)
    return Unpacked(
        quants.reshape(len(raw), -1, BLOCK).view(np.int8),
        (numbers[:, :1] * scales).reshape(shape),
        (-numbers[:, 1:] * minima).reshape(shape),
    )


@np.errstate(over="ignore")
def half(values: FloatArray) -> FloatArray:
    """Round to float16 values, returned in float32; overflow gives infinity."""
    return values.astype(np.float16).astype(np.float32)


@np.errstate(over="ignore", invalid="ignore")
def zero_scale(scales: FloatArray, levels: int) -> FloatArray:
    """The nearest scales whose multiples up to `levels` are all float16 values, so that −scale · zero is exact."""
    fraction, exponent = np.frexp(scales)
    kept = np.float32(1 << 11 - (levels - 1).bit_length())
    return half(np.ldexp(np.rint(fraction * kept) / kept, exponent).astype(np.float32))


def _spread(numbers: FloatArray) -> FloatArray:
    return np.repeat(numbers, BLOCK, axis=1)


def _nibbles(packed: AnyArray) -> AnyArray:
    """Unpack [..., n] to [..., 2 n]: low halves first, then high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _type_id(kind: str) -> int:
    try:
        return TYPE_IDS[kind]
    except KeyError:
        raise UnsupportedError(f"there is no block type {kind}") from None
