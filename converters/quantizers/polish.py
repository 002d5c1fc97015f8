"""Refine a quantized matrix: better scales for its codes, then better codes one column at a time.

Both steps lower tr((W − Ŵ)H(W − Ŵ)ᵀ), the squared error of the matrix's outputs; only rounding scales to float16 can
raise it.
"""

from __future__ import annotations

import numpy as np

from edge.formats.blocks import BLOCK, QuantizedMatrix, half, zero_scale
from edge.types import AnyArray, FloatArray


def polish(
    weight: FloatArray, quantized: QuantizedMatrix, hessian: AnyArray, group_size: int = BLOCK
) -> QuantizedMatrix:
    """Refine `quantized`. weight: float32 [rows, columns]; hessian: XᵀX, float64 [columns, columns], damped as for
    rounding.

    group_size: values that share a scale; scales shared by several blocks stay.
    """
    return descend(weight, refit(weight, quantized, hessian) if group_size == BLOCK else quantized, hessian)


def refit(weight: FloatArray, quantized: QuantizedMatrix, hessian: AnyArray) -> QuantizedMatrix:
    """Fit the scales of all blocks of a row jointly, by least squares; codes and zero points stay."""
    rows, blocks = quantized.scales.shape
    narrow = hessian.astype(np.float32)
    zeros = np.float32(0) if quantized.minima is None else np.repeat(_zeros(quantized), BLOCK, axis=1)
    steps = quantized.grid.levels[quantized.codes] - zeros  # Ŵ = scale · steps
    wanted = _block_sums((weight @ narrow) * steps)
    normal = np.empty((rows, blocks, blocks))
    for block in range(blocks):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        normal[:, block] = _block_sums((steps[:, own] @ narrow[own]) * steps)
    # A block of zeros has no scale: it may keep any.
    normal += np.eye(blocks) * (normal.diagonal(axis1=1, axis2=2) == 0)[:, None, :]
    scales = np.linalg.solve(normal, wanted[..., None].astype(np.float64))[..., 0].astype(np.float32)
    if quantized.minima is None:
        return QuantizedMatrix(quantized.grid, quantized.codes, half(scales))
    scales = zero_scale(scales, len(quantized.grid.levels))
    return QuantizedMatrix(quantized.grid, quantized.codes, scales, -scales * _zeros(quantized))


def descend(weight: FloatArray, quantized: QuantizedMatrix, hessian: AnyArray) -> QuantizedMatrix:
    """Coordinate descent over codes: each column is rounded to its best values while the others stay."""
    narrow, grid = hessian.astype(np.float32), quantized.grid
    values, codes = np.ascontiguousarray(quantized.values.T), np.ascontiguousarray(quantized.codes.T)
    pull = narrow @ (np.ascontiguousarray(weight.T) - values)  # the negative gradient of each weight, [columns, rows]
    for first in range(0, len(narrow), BLOCK):
        own = slice(first, first + BLOCK)
        inner, part, moves = narrow[own, own], pull[own].copy(), np.empty_like(pull[own])
        scales = quantized.scales[:, first // BLOCK]
        minima = None if quantized.minima is None else quantized.minima[:, first // BLOCK]
        for at in range(BLOCK):
            best = values[first + at] + part[at] / inner[at, at]
            codes[first + at] = grid.codes(best, scales, minima)
            moves[at] = grid.values(codes[first + at], scales, minima) - values[first + at]
            part[at + 1 :] -= inner[at + 1 :, at, None] * moves[at]
        pull -= narrow[:, own] @ moves
    return QuantizedMatrix(grid, np.ascontiguousarray(codes.T), quantized.scales, quantized.minima)


def _zeros(quantized: QuantizedMatrix) -> FloatArray:
    """Zero points, float32 [rows, blocks], integral."""
    assert quantized.minima is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(quantized.scales == 0, 0, np.rint(-quantized.minima / quantized.scales)), np.float32)


def _block_sums(values: FloatArray) -> FloatArray:
    return np.asarray(values.reshape(len(values), -1, BLOCK).sum(axis=-1))
