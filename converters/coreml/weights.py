"""Weights of a GGUF file as constants of a Core ML program.

Blocks of 32 weights stay blocks: `constexpr_blockwise_shift_scale` computes scale · (data − offset), with data of 4
or 8 bits and a float16 scale. Block types without a minimum have no offset; in those with one, a float16 offset keeps
11 bits of the minimum. Unquantized weights become float16.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from edge.backends.onnx.graph.forms import Blocks, Form, RawRows, damaged
from edge.backends.onnx.graph.layout import Layout, SourceRows
from edge.backends.onnx.graph.matmul_nbits import is_exact, nearest, to_blocks
from edge.backends.onnx.graph.weights import read_rows, slices
from edge.errors import ModelFormatError
from edge.formats.blocks import BLOCK
from edge.formats.gguf import GGUFFile
from edge.types import AnyArray, FloatArray

_EPSILON, _TINIEST = 2e-3, 1e-6  # of a row's largest weight; and of a scale below float16's normal numbers
_LARGEST_OFFSET = 1 << 15  # beyond it, 15 steps are less than the rounding of the block's minimum to float16


@dataclass(frozen=True)
class Constant:
    """A constant of the program."""

    data: AnyArray  # float16 of any shape, or integers [rows, columns]: int8, or uint8 with offsets
    bits: int = 16
    scales: AnyArray | None = None  # float16 [rows, columns / 32]
    offsets: AnyArray | None = None  # float16 [rows, columns / 32]

    def part(self, first: int, count: int) -> Constant:
        """`count` rows of a matrix from `first` on."""
        here = slice(first, first + count)
        scales, offsets = (None if each is None else each[here] for each in (self.scales, self.offsets))
        return Constant(self.data[here], self.bits, scales, offsets)

    def values(self) -> FloatArray:
        """float32, of the shape of `data`."""
        if self.scales is None:
            return self.data.astype(np.float32)
        steps = self.data.astype(np.float32).reshape(*self.scales.shape, BLOCK)
        if self.offsets is not None:
            steps -= self.offsets.astype(np.float32)[..., None]
        return (steps * self.scales.astype(np.float32)[..., None]).reshape(self.data.shape)


class Constants:
    """The constants of a layout by name, read from an open file on demand."""

    def __init__(self, file: GGUFFile, source: BinaryIO, layout: Layout) -> None:
        self._file, self._source, self._layout = file, source, layout

    def matrix(self, name: str) -> Constant:
        """Read a matrix. Raises ModelFormatError for weights that are not finite in float16."""
        matrix = self._layout.matrices[name]
        return constant_of(self._rows(matrix.parts), (matrix.rows, matrix.columns), matrix.form)

    def bits(self, name: str) -> int:
        """Bits per stored weight of a matrix."""
        form = self._layout.matrices[name].form
        return form.bits if isinstance(form, Blocks) else 16

    def vector(self, name: str) -> Constant:
        """Read a vector. Raises as `matrix`."""
        shape = self._layout.places[name].array.shape
        pieces = [to_float16(rows.values(), rows.name) for rows in self._rows(self._layout.vectors[name])]
        return Constant(np.concatenate(pieces).reshape(shape))

    def vector_rows(self, name: str) -> Iterator[FloatArray]:
        """Read a matrix of vectors in slices, float32 [some, columns]."""
        return (rows.values() for rows in self._rows(self._layout.vectors[name]))

    def samples(self, name: str) -> Iterator[tuple[int, int, FloatArray, FloatArray]]:
        """Sample the first, middle and last rows of every part of a matrix: their start, count, values float32 [n,
        columns], and the largest error allowed for each."""
        matrix, before = self._layout.matrices[name], 0
        for part in matrix.parts:
            head = len(part.order) or 1
            for first in sorted({0, part.source.rows // head // 2 * head, part.source.rows - head}):
                rows = read_rows(self._file, self._source, self._layout, part, first, head)
                values = rows.values()
                slack = np.abs(values).max(axis=1, keepdims=True) * np.float32(_EPSILON) + np.float32(_TINIEST)
                if isinstance(matrix.form, Blocks) and not is_exact(rows.kind, matrix.form.bits):
                    slack = slack + np.repeat(nearest(values).scales * np.float32(0.51), BLOCK, axis=1)
                yield before + first, head, values, np.broadcast_to(slack, values.shape)
            before += part.source.rows

    def _rows(self, parts: tuple[SourceRows, ...]) -> Iterator[RawRows]:
        """Slices of all parts."""
        return (rows for part in parts for rows in slices(self._file, self._source, self._layout, part))


def constant_of(pieces: Iterable[RawRows], shape: tuple[int, int], form: Form) -> Constant:
    """Assemble a matrix [rows, columns] from its rows. form: blocks; anything else gives float16.

    Raises ModelFormatError for weights that are not finite in float16.
    """
    if not isinstance(form, Blocks):
        return Constant(np.concatenate([to_float16(rows.values(), rows.name) for rows in pieces]))
    first, blocks = 0, (shape[0], shape[1] // BLOCK)
    data, scales = np.empty(shape, np.uint8 if form.minima else np.int8), np.empty(blocks, np.float16)
    offsets = np.empty(blocks, np.float16) if form.minima else None
    for rows in pieces:
        here = slice(first, first := first + len(rows.raw))
        steps, scales[here], offset = _blocks(rows, form)
        data[here] = steps.reshape(len(rows.raw), -1)
        if offsets is not None:
            offsets[here] = offset
    return Constant(data, form.bits, scales, offsets)


def to_float16(values: FloatArray, name: str) -> AnyArray:
    """Convert to float16. Raises ModelFormatError for values that it cannot hold."""
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16)
    if not np.isfinite(rounded).all():
        raise ModelFormatError(f"{name} has weights beyond 65504, which Core ML's float16 cannot hold")
    return rounded


def _blocks(rows: RawRows, form: Blocks) -> tuple[AnyArray, AnyArray, AnyArray | None]:
    """Codes [rows, blocks, 32], scales [rows, blocks], and offsets where the form has minima."""
    blocks = to_blocks(rows.raw, rows.kind, form.bits) if is_exact(rows.kind, form.bits) else nearest(rows.values())
    rest = np.zeros_like(blocks.scales) if blocks.rest is None else blocks.rest
    if not (np.isfinite(blocks.scales) & np.isfinite(rest)).all():
        raise damaged(rows.name)
    scales = to_float16(blocks.scales, rows.name)
    if not form.minima:
        return (blocks.quants - blocks.zeros[..., None]).view(np.int8), scales, None
    minima: FloatArray = rest - blocks.scales * blocks.zeros.astype(np.float32)  # of each block, the value of step 0
    rounded = scales.astype(np.float32)
    flat = np.abs(minima) >= np.abs(rounded) * _LARGEST_OFFSET
    offsets = np.asarray(-minima / np.where(flat, np.float32(1), rounded), np.float32)
    quants = np.where(flat[..., None], np.uint8(0), blocks.quants)
    return quants, np.where(flat, np.float16(1), scales), to_float16(offsets, rows.name)
