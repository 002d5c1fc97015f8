"""The forms in which matrices are stored: the arrays of each, and the encoding of rows.

A form is a frozen dataclass with three methods: `arrays` (names, types and shapes, before any weight is read), `stored`
(encodes rows), `restored` (decodes rows, with the largest error of each).
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import numpy as np

from edge.backends.onnx.graph.matmul_nbits import is_exact, nearest, pack, to_blocks, unpack, with_means
from edge.errors import ModelFormatError
from edge.formats import nf4
from edge.formats.blocks import BLOCK, dequantize
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_NUMPY_OF = {"float32": "float32", "float16": "float16", "bfloat16": "uint16", "uint8": "uint8", "int8": "int8"}
_EPSILON = 1e-5  # relative error of float32 scales


@dataclass(frozen=True)
class Array:
    """An array of a form."""

    dtype: str
    shape: tuple[int, ...]
    rows_axis: int = 0  # axis of the matrix's rows

    @property
    def numpy(self) -> np.dtype[np.generic]:
        return np.dtype(_NUMPY_OF[self.dtype])


@dataclass(frozen=True)
class RawRows:
    """Some rows of a tensor of the file."""

    name: str
    raw: AnyArray  # uint8 [rows, row bytes], in blocks of type `kind`
    kind: str
    factors: FloatArray | None = None  # of columns, float32 [columns]; None: 1
    divisors: FloatArray | None = None  # of rows, float32 [rows]; None: 1
    factor: float = 1.0  # of all values

    def values(self) -> FloatArray:
        """Decode to a new array, float32 [rows, columns]. Raises ModelFormatError for values that are not finite."""
        values = np.array(dequantize(self.raw, self.kind))
        if not np.isfinite(values).all():
            raise damaged(self.name)
        if self.factor != 1:
            values *= np.float32(self.factor)
        if self.factors is not None:
            values *= self.factors
        if self.divisors is not None:
            values /= self.divisors[:, None]
        return values


Stored = dict[str, AnyArray]


class Form(Protocol):
    def arrays(self, rows: int, columns: int) -> dict[str, Array]: ...

    def stored(self, rows: RawRows) -> Stored:
        """Encode rows. Raises UnsupportedError for types that cannot be read."""
        ...

    def restored(self, stored: Stored, kind: str) -> tuple[FloatArray, FloatArray]:
        """Decode rows that had this block type: float32 [rows, columns], and the largest error of each."""
        ...


@dataclass(frozen=True)
class Floats:
    """Unquantized weights. dtype: float32, or the file's float16 or bfloat16, which ONNX Runtime converts to
    float32."""

    dtype: str = "float32"

    def arrays(self, rows: int, columns: int) -> dict[str, Array]:
        return {"floats": Array(self.dtype, (rows, columns))}

    def stored(self, rows: RawRows) -> Stored:
        values = rows.values()
        if self.dtype == "float32":
            return {"floats": values}
        return {"floats": rows.raw.view(_NUMPY_OF[self.dtype])}

    def restored(self, stored: Stored, kind: str) -> tuple[FloatArray, FloatArray]:
        floats = stored["floats"]
        if self.dtype == "bfloat16":
            floats = (floats.astype(np.uint32) << 16).view(np.float32)
        values = np.asarray(floats, np.float32)
        return values, np.abs(values) * np.float32(_EPSILON)


@dataclass(frozen=True)
class Blocks:
    """MatMulNBits: blocks of 32 integers with a scale. minima: with zero points, and an extra column for the mean of
    every block of inputs."""

    bits: int
    minima: bool = False

    def means(self, columns: int) -> int:
        return columns // BLOCK if self.minima else 0

    def arrays(self, rows: int, columns: int) -> dict[str, Array]:
        blocks = -(-(columns + self.means(columns)) // BLOCK)
        arrays = {
            "quants": Array("uint8", (rows, blocks, BLOCK * self.bits // 8)),
            "scales": Array("float32", (rows, blocks)),
        }
        return arrays | ({"zeros": Array("uint8", (rows, (blocks * self.bits + 7) // 8))} if self.minima else {})

    def stored(self, rows: RawRows) -> Stored:
        exact = is_exact(rows.kind, self.bits)
        blocks = to_blocks(rows.raw, rows.kind, self.bits) if exact else nearest(rows.values())
        if not np.isfinite(blocks.scales).all():
            raise damaged(rows.name)
        if self.minima:
            blocks = with_means(blocks)
        stored = {"quants": pack(blocks.quants, self.bits), "scales": blocks.scales}
        return stored | ({"zeros": pack(blocks.zeros, self.bits)} if self.minima else {})

    def restored(self, stored: Stored, kind: str) -> tuple[FloatArray, FloatArray]:
        scales = stored["scales"]
        rows, blocks = scales.shape
        quants = unpack(stored["quants"], self.bits).reshape(rows, blocks, BLOCK).astype(np.float32)
        zeros = np.full(scales.shape, 1 << self.bits - 1, np.float32)
        if self.minima:
            zeros[:] = unpack(stored["zeros"], self.bits)[:, :blocks]
        values = (quants - zeros[..., None]) * scales[..., None]
        steps = np.abs(scales)
        error: FloatArray = steps * np.float32(0.01 if is_exact(kind, self.bits) else 0.51)
        if self.minima:
            count = blocks * BLOCK // (BLOCK + 1)  # of blocks of weights; those behind are for means
            rest = values[:, count:].reshape(rows, -1)[:, :count] / BLOCK
            error = error[:, :count] + np.repeat(steps[:, count:], BLOCK, axis=1)[:, :count] * np.float32(0.51 / BLOCK)
            values = values[:, :count] + rest[..., None]
        return values.reshape(rows, -1), np.repeat(error, BLOCK, axis=1)


@dataclass(frozen=True)
class NormalFloats:
    """MatMulBnb4: 4-bit NF4 codes, a scale for every 64. type: its name in edge.json."""

    type: ClassVar[str] = "NF4"

    def arrays(self, rows: int, columns: int) -> dict[str, Array]:
        return {
            "nf4": Array("uint8", (rows, columns // 2)),
            "scales": Array("float32", (rows, columns // nf4.BLOCK)),
        }

    def stored(self, rows: RawRows) -> Stored:
        codes, scales = nf4.quantize(rows.values())
        return {"nf4": nf4.pack(codes), "scales": scales}

    def restored(self, stored: Stored, kind: str) -> tuple[FloatArray, FloatArray]:
        values = nf4.dequantize(nf4.unpack(stored["nf4"]), stored["scales"])
        largest_gap = np.float32(np.diff(nf4.LEVELS).max() * 0.51)
        return values, np.repeat(stored["scales"] * largest_gap, nf4.BLOCK, axis=1)


@dataclass(frozen=True)
class Int8:
    """DynamicQuantizeMatMul: int8 with a scale per row; the columns `outliers` in float32."""

    type: ClassVar[str] = "INT8"
    outliers: tuple[int, ...] = ()

    def arrays(self, rows: int, columns: int) -> dict[str, Array]:
        arrays = {"quants": Array("int8", (columns, rows), rows_axis=1), "scales": Array("float32", (rows,))}
        outliers = {"floats": Array("float32", (len(self.outliers), rows), rows_axis=1)}
        return arrays | (outliers if self.outliers else {})

    def stored(self, rows: RawRows) -> Stored:
        values, outliers = rows.values(), list(self.outliers)
        floats = values[:, outliers].T
        values[:, outliers] = 0
        quants, scales = round_rows(values)
        return {"quants": quants.T, "scales": scales} | ({"floats": floats} if outliers else {})

    def restored(self, stored: Stored, kind: str) -> tuple[FloatArray, FloatArray]:
        scales = stored["scales"][:, None]
        values = stored["quants"].T.astype(np.float32) * scales
        errors = np.broadcast_to(scales * np.float32(0.51), values.shape).copy()
        if self.outliers:
            values[:, list(self.outliers)], errors[:, list(self.outliers)] = stored["floats"].T, 0
        return values, errors


def round_rows(values: FloatArray) -> tuple[AnyArray, FloatArray]:
    """Round float32 [rows, columns] to −127 … 127, int8 [rows, columns], with scales, float32 [rows]."""
    scales = np.abs(values).max(axis=-1) / np.float32(127)
    steps = np.rint(values / np.where(scales == 0, np.float32(1), scales)[:, None])
    return steps.astype(np.int8), scales


def damaged(name: str) -> ModelFormatError:
    return ModelFormatError(f"{name} contains values that are no numbers: the file is damaged")
