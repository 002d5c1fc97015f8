"""Small floats with shared scales: FP8 and MXFP8, MXFP4 and NVFP4, and bitsandbytes' tables of 16 values.

Weights of FP8 are E4M3 or E5M2, times scales that blocks of any size share. A byte of FP4 holds two E2M1 codes, the
first in the low half; 32 codes share a power of two (MXFP4, OCP Microscaling Formats 1.0), or 16 codes a scale in E4M3,
and a matrix another one (NVFP4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from edge.converters.huggingface.checkpoint import CheckpointTensor, Kept, Loss
from edge.converters.huggingface.quantized.matrix import ROUNDED, Quantized
from edge.errors import ModelFormatError
from edge.formats.blocks import BLOCK, FP4, NVFP4_GROUP, NVFP4_GROUPS, block_size, dequantize, nbytes
from edge.formats.small_floats import E4M3, E5M2, E8M0
from edge.types import AnyArray, FloatArray

SIX = "Q6_K"
_BYTES = nbytes("MXFP4", BLOCK)
_LEVELS = np.array(FP4, np.float32) / 2


FP8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}


@dataclass(frozen=True)
class Fp8(Quantized):
    """A matrix in FP8, whose scales [a, b] each serve `block` values (rows, columns); the last may be fewer."""

    block: tuple[int, int] = (1, 1)
    weight: str = "F8_E4M3"

    def opened(self) -> Callable[[slice], FloatArray]:
        raw = self.parts["weight"].read().view(np.uint8).reshape(-1, self.shape[-1])
        scales = scales_of(self, "scale")
        scales = scales.reshape(-1, scales.shape[-1]) if scales.ndim > 1 else scales.reshape(-1, 1)
        (height, width), rows = self.block, self.shape[-2]
        each = -(-rows // height)  # rows of scales of a matrix

        def take(chosen: slice) -> FloatArray:
            numbers = np.arange(chosen.start, chosen.stop)
            found = scales[numbers // rows * each + numbers % rows // height]
            with np.errstate(invalid="ignore"):
                values = FP8[self.weight][raw[chosen]] * found.repeat(width, axis=1)[:, : self.shape[-1]]
            if not np.isfinite(values).all():
                raise self.wrong("has values that are no numbers")
            return np.asarray(values, np.float32)

        return take


@dataclass(frozen=True)
class Factor:
    """The factor of a matrix in NVFP4, as a tensor of its own."""

    of: Fp4

    dtype, shape = "F32", (1,)

    @property
    def path(self) -> Path:
        return self.of.path

    @property
    def name(self) -> str:
        return self.of.name

    def read(self) -> AnyArray:
        return np.array([self.of.factor()], np.float32)


@dataclass(frozen=True)
class Fp4(Quantized):
    """A matrix in MXFP4 or NVFP4. Scales are bytes: E8M0 of 32 values or E4M3 of 16, which `factor` multiplies."""

    divided: bool = False  # `factor` divides instead

    @property
    def is_nvfp4(self) -> bool:
        """Whether blocks of NVFP4 hold the matrix."""
        columns, groups = self.shape[-1], self.parts["scale"].shape[-1]
        return len(self.shape) == 2 and columns == groups * NVFP4_GROUP and groups % NVFP4_GROUPS == 0

    def factor(self) -> float:
        """The factor of all scales. Raises ModelFormatError."""
        if "factor" not in self.parts:
            return 1.0
        found = float(self.floats("factor").reshape(-1)[0])
        if not found:
            raise self.wrong("has a factor of 0")
        return 1 / found if self.divided else found

    def opened(self) -> Callable[[slice], FloatArray]:
        raw = self.parts["weight"].read().view(np.uint8).reshape(-1, self.shape[-1] // 2)
        scales = scales_of(self, "scale").reshape(len(raw), -1)
        factor = self.factor()

        def take(chosen: slice) -> FloatArray:
            values = _LEVELS[_pairs(raw[chosen])]
            found = (scales[chosen] * np.float32(factor)).repeat(self.shape[-1] // scales.shape[1], axis=1)
            return np.asarray(values * found, np.float32)

        return take

    def read_blocks(self) -> Kept:
        if self.block_type == SIX:
            return self._in_six_bits()
        if self.block_type != "MXFP4":
            return super().read_blocks()
        raw = self.parts["weight"].read().view(np.uint8).reshape(-1, BLOCK // 2)
        scales_of(self, "scale")  # refuses NaN
        scales = self.parts["scale"].read().reshape(-1)
        return self.kept(mxfp4_blocks(raw, scales).reshape(-1, self.shape[-1] // BLOCK * _BYTES), Loss())

    def nvfp4_blocks(self) -> AnyArray:
        """NVFP4's own blocks, whose factor is apart: uint8 [rows, bytes]."""
        codes = _pairs(self.parts["weight"].read().view(np.uint8).reshape(-1, NVFP4_GROUP // 2))
        codes = codes.reshape(-1, NVFP4_GROUPS, NVFP4_GROUP)
        if (scales_of(self, "scale") < 0).any():
            raise self.wrong("has scales below 0")
        half, made = NVFP4_GROUP // 2, self.room("NVFP4")
        blocks = made.reshape(len(codes), -1)
        blocks[:, :NVFP4_GROUPS] = self.parts["scale"].read().view(np.uint8).reshape(len(codes), -1)
        blocks[:, NVFP4_GROUPS:] = (codes[..., :half] | codes[..., half:] << 4).reshape(len(codes), -1)
        return made

    def _in_six_bits(self) -> Kept:
        """NVFP4 in Q6_K, which has integers of 8 bits as scales of 16 values, and a float16 for 256 values.

        A scale in E4M3 is an integer up to 15 times a power of two. So all are kept but those below 1/8 of the largest
        of their 16, of which some are rounded.
        """
        take, raw = self.opened(), self.parts["weight"].read().view(np.uint8).reshape(-1, self.shape[-1] // 2)
        scales = scales_of(self, "scale").reshape(len(raw), -1, 16)
        result, loss, factor = self.room(SIX), Loss(), self.factor() / 2
        for chosen in self.slices():
            levels = np.array(FP4, np.int8)[_pairs(raw[chosen])].reshape(-1, scales.shape[1], 256)
            most = np.abs(scales[chosen]).max(axis=2, keepdims=True)
            unit = np.exp2(np.ceil(np.log2(np.maximum(most, np.float32(2**-9)) / 127)))
            integers = np.rint(scales[chosen] / unit).astype(np.int8)
            result[chosen] = q6_k(levels, integers, unit * factor).reshape(len(levels), -1)
            loss.add(take(chosen), self.check_finite(dequantize(result[chosen], SIX), SIX))
        return self.kept(result, loss)


def fp4_type(mode: str, columns: int) -> str | None:
    """The block type that MXFP4 or NVFP4 becomes; None: rows are no whole blocks."""
    if columns % BLOCK:
        return None
    return "MXFP4" if mode == "MXFP4" else ROUNDED if columns % block_size(SIX) else SIX


def scales_of(matrix: Quantized, part: str) -> FloatArray:
    """Scales that are floats or bytes, E4M3 or E8M0, as float32. Raises ModelFormatError."""
    stored = matrix.parts[part]
    if stored.dtype not in ("F8_E4M3", "F8_E8M0", "U8"):
        return matrix.floats(part)
    bytes_of_16 = stored.dtype == "U8" and stored.shape[-1:] == (matrix.shape[-1] // 16,)
    table = E4M3 if stored.dtype == "F8_E4M3" or bytes_of_16 else E8M0
    found = table[stored.read().view(np.uint8)]
    if not np.isfinite(found).all():
        raise ModelFormatError(f"{matrix.path}: {stored.name} has values that are no numbers")
    return found


def q6_k(levels: AnyArray, scales: AnyArray, units: FloatArray) -> AnyArray:
    """Blocks of Q6_K, uint8 [rows, blocks, 210]: unit · scale · level.

    levels: int8 [rows, blocks, 256], −32 to 31. scales: int8 [rows, blocks, 16]. units: float32 [rows, blocks, 1].
    """
    rows, blocks, _ = levels.shape
    codes = (levels + 32).astype(np.uint8).reshape(rows, blocks, 2, 4, 32)  # two halves, each four runs of 32
    low, high = codes & 15, codes >> 4
    pairs = low[..., :2, :] | low[..., 2:, :] << 4
    fours = np.bitwise_or.reduce(high << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=3)
    parts = (pairs, fours, scales.view(np.uint8), units.astype(np.float16).view(np.uint8))
    return np.concatenate([each.reshape(rows, blocks, -1) for each in parts], axis=-1)


@dataclass(frozen=True)
class Mxfp4:
    """Stacked experts in MXFP4, as gpt-oss has them.

    Read as the same values in bfloat16, [experts, rows, columns].
    """

    blocks: CheckpointTensor  # uint8 [experts, rows, columns / 32, 16]
    scales: CheckpointTensor  # uint8 [experts, rows, columns / 32], exponents with a bias of 127
    name: str
    rows: slice  # the rows to take

    dtype, block_type, format = "BF16", "MXFP4", "MXFP4"

    @classmethod
    def of(cls, blocks: CheckpointTensor, scales: CheckpointTensor) -> Mxfp4:
        """All rows of a pair of tensors. Raises ModelFormatError if they do not fit each other."""
        fits = blocks.shape == (*scales.shape, BLOCK // 2) and len(scales.shape) == 3
        if not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            raise ModelFormatError(f"{blocks.path}: {blocks.name} is no matrix in MXFP4")
        return cls(blocks, scales, blocks.name, slice(None))

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, count = self.scales.shape
        return experts, len(range(*self.rows.indices(rows))), count * BLOCK

    def with_rows(self, name: str, rows: slice) -> Mxfp4:
        return replace(self, name=name, rows=rows)

    def read(self) -> AnyArray:
        data, _ = self.read_blocks()
        values = dequantize(data.reshape(-1, self.shape[2] // BLOCK * _BYTES), self.block_type)
        return (values.view(np.uint32) >> 16).astype(np.uint16).reshape(self.shape)

    def read_blocks(self) -> Kept:
        scales = self.scales.read()[:, self.rows]
        if not np.isfinite(E8M0[scales]).all():
            raise ModelFormatError(f"{self.path}: {self.scales.name} has values that are no numbers")
        made = mxfp4_blocks(self.blocks.read()[:, self.rows], scales)
        return Kept(made.reshape(*made.shape[:2], -1), Loss())


def mxfp4_blocks(codes: AnyArray, scales: AnyArray) -> AnyArray:
    """GGUF's blocks, uint8 [..., 17], of codes [..., 16] and scales: the scale, then the codes of the first half in low
    nibbles, and of the second half in high nibbles."""
    each, half = _pairs(codes), BLOCK // 2
    made = np.empty((*scales.shape, _BYTES), np.uint8)
    made[..., 0], made[..., 1:] = scales.view(np.uint8), each[..., :half] | each[..., half:] << 4
    return made


def _pairs(raw: AnyArray) -> AnyArray:
    """Unpack bytes [..., n] to codes [..., 2 n], those of low halves first."""
    each = np.empty((*raw.shape[:-1], 2 * raw.shape[-1]), np.uint8)
    each[..., ::2], each[..., 1::2] = raw & 15, raw >> 4
    return each


@dataclass(frozen=True)
class Table(Quantized):
    """A matrix of bitsandbytes: codes of 4 bits, the first in the high half of a byte, of values in a table.

    As many values as `block` states share a scale, across rows, too. Scales may be codes of 8 bits of a table
    themselves (double quantization): scale = table[code] · nested scale + offset.
    """

    block: int = 64
    nested_block: int = 0  # scales that share a nested scale; 0: scales are floats
    offset: float = 0.0

    def opened(self) -> Callable[[slice], FloatArray]:
        rows, columns = self.shape
        raw, table = self.parts["weight"].read().reshape(-1), self.floats("quant_map")
        codes = np.stack([raw >> 4, raw & 15], axis=-1).reshape(-1)[: rows * columns].reshape(rows, columns)
        if self.nested_block:
            nested = self.floats("nested_absmax").reshape(-1)
            scales = self.floats("nested_quant_map")[self.parts["absmax"].read().reshape(-1)]
            scales = scales * nested[np.arange(scales.size) // self.nested_block] + np.float32(self.offset)
        else:
            scales = self.floats("absmax").reshape(-1)

        def take(chosen: slice) -> FloatArray:
            at = np.arange(chosen.start * columns, chosen.stop * columns).reshape(-1, columns) // self.block
            return np.asarray(table[codes[chosen]] * scales[at], np.float32)

        return take
