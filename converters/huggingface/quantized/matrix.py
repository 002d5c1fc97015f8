"""A matrix that a checkpoint stores quantized: its values as floats, and blocks of GGUF that keep them.

Blocks have scales in float16. They hold integers of 8 bits and less exactly if the checkpoint's scales and offsets are
float16 values and groups are whole blocks. What no block holds is rounded to Q8_0, and the error is measured.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edge.converters.huggingface.checkpoint import Kept, Loss
from edge.converters.quantizers.rtn import quantize
from edge.errors import ModelFormatError
from edge.formats.blocks import BLOCK, QuantizedMatrix, dequantize, find_grid, half, nbytes
from edge.formats.safetensors import Stored
from edge.types import AnyArray, FloatArray

ROUNDED = "Q8_0"  # for values that no block holds
_SLICE = 1 << 18  # values worked on at a time
_TOGETHER = 8  # rows in a word of AWQ
_NEAR = 0.25  # steps that an offset may be from a whole zero point: less than the error of rounding to Q8_0


@dataclass(frozen=True)
class Quantized(ABC):
    """A quantized matrix [..., rows, columns]. `values` gives some of its rows, counted over all leading axes."""

    path: Path
    name: str  # of the float matrix
    shape: tuple[int, ...]
    format: str  # for people, such as `MLX, 4 bits`
    parts: dict[str, Stored] = field(repr=False)
    dtype: str = "F16"  # of the floats that it is read as; or F32
    block_type: str | None = ROUNDED  # None: rows are no whole blocks

    @abstractmethod
    def opened(self) -> Callable[[slice], FloatArray]:
        """Read the parts. The function that is returned makes float32 [rows, columns] of a slice of all rows."""

    def read(self) -> AnyArray:
        """The matrix as floats. Raises ModelFormatError."""
        take = self.opened()
        result = np.empty(self.shape, np.float16 if self.dtype == "F16" else np.float32)
        flat = result.reshape(-1, self.shape[-1])
        for chosen in self.slices():
            with np.errstate(over="ignore"):
                flat[chosen] = take(chosen)
            self.check_finite(flat[chosen], self.dtype)
        return result

    def read_blocks(self) -> Kept:
        """The matrix in blocks of `block_type`. Raises ModelFormatError."""
        return self.rounded(self.opened())

    def rounded(self, take: Callable[[slice], FloatArray]) -> Kept:
        """The nearest values of Q8_0."""
        result, loss = self.room(ROUNDED), Loss()
        for chosen in self.slices():
            values = take(chosen)
            result[chosen] = quantize(values, ROUNDED)
            loss.add(values, self.check_finite(dequantize(result[chosen], ROUNDED), ROUNDED))
        return self.kept(result, loss)

    def room(self, kind: str) -> AnyArray:
        """Memory for all rows in a block type, uint8 [rows, bytes]."""
        return np.empty((prod(self.shape[:-1]), nbytes(kind, self.shape[-1])), np.uint8)

    def kept(self, rows: AnyArray, loss: Loss) -> Kept:
        return Kept(rows.reshape(*self.shape[:-1], -1), loss)

    def slices(self) -> list[slice]:
        rows = prod(self.shape[:-1])
        step = max(1, _SLICE // self.shape[-1] // _TOGETHER) * _TOGETHER
        return [slice(first, min(first + step, rows)) for first in range(0, rows, step)]

    def wrong(self, text: str) -> ModelFormatError:
        return ModelFormatError(f"{self.path}: {self.name} {text}")

    def check_finite(self, values: AnyArray, kind: str | None) -> AnyArray:
        """The values. Raises ModelFormatError if a type does not hold them."""
        if not np.isfinite(values).all():
            raise self.wrong(f"has values that are infinite as {kind}")
        return values

    def floats(self, part: str) -> FloatArray:
        """A part of floats, as float32. Raises ModelFormatError for values that are no numbers."""
        stored = self.parts[part]
        array = stored.read()
        values = (array.astype(np.uint32) << 16).view(np.float32) if stored.dtype == "BF16" else array
        if not np.isfinite(values).all():
            raise ModelFormatError(f"{self.path}: {stored.name} has values that are no numbers")
        return np.asarray(values, np.float32)


class Steps(NamedTuple):
    """Rows of integers. A value is scale · (code − zero), or scale · code + offset."""

    codes: AnyArray  # int16 [rows, columns], from 0
    scales: FloatArray  # float32 [rows, groups]
    zeros: AnyArray | None  # int16 [rows, groups]
    offsets: FloatArray | None = None  # float32 [rows, groups]


@dataclass(frozen=True)
class Integers(Quantized):
    """A matrix of integers whose columns share scales in groups."""

    bits: int = 4
    group_size: int = BLOCK  # columns, or all of them

    @abstractmethod
    def steps(self) -> tuple[Callable[[slice], Steps], AnyArray]:
        """Read the parts: a function that takes rows, and the group of every column."""

    def opened(self) -> Callable[[slice], FloatArray]:
        take, groups = self.steps()
        return lambda chosen: _values(take(chosen), groups)

    def read_blocks(self) -> Kept:
        take, groups = self.steps()
        blocks = groups.reshape(-1, BLOCK)
        if (blocks != blocks[:, :1]).any():
            if self.block_type != ROUNDED:
                raise self.wrong("has groups that are not in order, though config.json says they are")
            return self.rounded(lambda chosen: _values(take(chosen), groups))
        assert self.block_type is not None
        result, loss = self.room(self.block_type), Loss()
        for chosen in self.slices():
            steps = take(chosen)
            result[chosen], made = self._blocks(steps, blocks[:, 0])
            if made is not None:
                loss.add(_values(steps, groups), self.check_finite(made, self.block_type))
        return self.kept(result, loss)

    def _blocks(self, steps: Steps, groups: AnyArray) -> tuple[AnyArray, FloatArray | None]:
        """Bytes of rows, and their values if these are not exactly the checkpoint's. groups: of blocks."""
        kind = str(self.block_type)
        if kind == ROUNDED:
            return _bytes_of_eight(steps, groups)
        codes, scales, zeros, offsets = steps
        grid = find_grid(kind)
        low: FloatArray | None = None
        if grid.minima:
            low = np.asarray(offsets if zeros is None else -scales * zeros, np.float32)
        elif np.any(zeros != -int(grid.levels[0])):
            raise self.wrong("has zero points that are not 8, though config.json says so")
        exact = [scales] if low is None else [scales, low]
        numbers = [half(each) for each in exact]
        for each in numbers:
            self.check_finite(each, kind)
        made = QuantizedMatrix(grid, codes.astype(np.uint8), *(each[:, groups] for each in numbers))
        return made.data, None if all(map(np.array_equal, numbers, exact)) else made.values


def _bytes_of_eight(steps: Steps, groups: AnyArray) -> tuple[AnyArray, FloatArray | None]:
    """Rows in Q8_0, as `_blocks`: blocks keep their codes, less a whole zero point, where these fit in a byte."""
    codes, scales, zeros, offsets = steps
    whole = np.zeros_like(scales) if zeros is None else zeros.astype(np.float32)
    if offsets is not None:
        with np.errstate(all="ignore"):
            whole = np.nan_to_num(np.rint(-offsets / scales), posinf=0, neginf=0)
    rows, count = len(codes), len(groups)
    moved = codes.reshape(rows, count, BLOCK) - whole[:, groups, None]
    heads = half(scales)[:, groups]
    kept = (moved.min(axis=2) >= -128) & (moved.max(axis=2) <= 127) & np.isfinite(heads)
    exact = np.array_equal(heads, scales[:, groups])
    if offsets is not None:
        missed = np.abs(offsets + whole * scales)
        exact = exact and not missed.any()
        kept &= (missed <= _NEAR * np.abs(scales))[:, groups]
    blocks: AnyArray = np.empty((rows, count, 2 + BLOCK), np.uint8)
    with np.errstate(all="ignore"):
        blocks[..., :2] = heads.astype(np.float16)[..., None].view(np.uint8)
        blocks[..., 2:] = moved.astype(np.int8).view(np.uint8)
    if not kept.all():
        plain = quantize(_values(steps, groups.repeat(BLOCK)), ROUNDED)
        blocks = np.where(kept[..., None], blocks, plain.reshape(blocks.shape))
    data = blocks.reshape(rows, -1)
    return data, None if kept.all() and exact else dequantize(data, ROUNDED)


def kept_type(bits: int, columns: int, group_size: int, *, symmetric: bool, in_order: bool = True) -> str | None:
    """The block type for integers, that holds them exactly where there is one; else Q8_0. None: no whole blocks."""
    if columns % BLOCK:
        return None
    if group_size % BLOCK or not in_order or bits > 5:
        return ROUNDED
    if bits == 5:
        return "Q5_1"
    return "Q4_0" if symmetric and bits == 4 else "Q4_1"


def unpack(words: AnyArray, bits: int) -> AnyArray:
    """Unpack words of 32 bits [rows, n], the lowest bits first, to int16 [rows, 32 · n / bits]."""
    rows = len(words)
    raw = np.ascontiguousarray(words).view(np.uint8).reshape(rows, -1)
    if bits == 8:
        return raw.astype(np.int16)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return np.asarray((raw[..., None] >> shifts & np.uint8((1 << bits) - 1)).reshape(rows, -1), np.int16)
    each = np.unpackbits(raw, axis=-1, bitorder="little")
    each = each[:, : each.shape[1] // bits * bits].reshape(rows, -1, bits)
    return np.asarray(np.packbits(each, axis=-1, bitorder="little")[..., 0], np.int16)


def _values(steps: Steps, groups: AnyArray) -> FloatArray:
    codes, scales, zeros, offsets = steps
    if offsets is not None:
        return np.asarray(codes * scales[:, groups] + offsets[:, groups], np.float32)
    moved = codes if zeros is None else codes - zeros[:, groups]
    return np.asarray(moved.astype(np.float32) * scales[:, groups], np.float32)
