"""What is left to gain once all codes are known: better scales for them, then better codes one column at a time.

Both lower tr((W − Ŵ)H(W − Ŵ)ᵀ), the squared error of a matrix's outputs, and neither can raise it but by rounding
scales to float16.
"""

from __future__ import annotations

import numpy as np

from edge.converters.grids import BLOCK, Coded, half, zero_scale
from edge.types import AnyArray, FloatArray


def polish(weight: FloatArray, coded: Coded, hessian: AnyArray, span: int = BLOCK) -> Coded:
    """weight: float32 [rows, columns]; hessian: XᵀX, float64 [columns, columns], as it was damped for rounding.

    span: values that share a scale; scales shared by several blocks stay.
    """
    return descend(weight, refit(weight, coded, hessian) if span == BLOCK else coded, hessian)


def refit(weight: FloatArray, coded: Coded, hessian: AnyArray) -> Coded:
    """The best scales of all blocks of a row together, by least squares; codes and zero points stay."""
    rows, blocks = coded.scales.shape
    narrow = hessian.astype(np.float32)
    zeros = np.float32(0) if coded.minima is None else np.repeat(_zeros(coded), BLOCK, axis=1)
    steps = coded.grid.levels[coded.codes] - zeros  # Ŵ = scale · steps
    wanted = _block_sums((weight @ narrow) * steps)
    normal = np.empty((rows, blocks, blocks))
    for block in range(blocks):
        own = slice(block * BLOCK, (block + 1) * BLOCK)
        normal[:, block] = _block_sums((steps[:, own] @ narrow[own]) * steps)
    # A block of zeros has no scale: it may keep any.
    normal += np.eye(blocks) * (normal.diagonal(axis1=1, axis2=2) == 0)[:, None, :]
    scales = np.linalg.solve(normal, wanted[..., None].astype(np.float64))[..., 0].astype(np.float32)
    if coded.minima is None:
        return Coded(coded.grid, coded.codes, half(scales))
    scales = zero_scale(scales, len(coded.grid.levels))
    return Coded(coded.grid, coded.codes, scales, -scales * _zeros(coded))


def descend(weight: FloatArray, coded: Coded, hessian: AnyArray) -> Coded:
    """Each column in turn moves to what is best while the others stay."""
    narrow, grid = hessian.astype(np.float32), coded.grid
    values, codes = np.ascontiguousarray(coded.values.T), np.ascontiguousarray(coded.codes.T)
    pull = narrow @ (np.ascontiguousarray(weight.T) - values)  # how far the error pulls each weight, [columns, rows]
    for first in range(0, len(narrow), BLOCK):
        own = slice(first, first + BLOCK)
        inner, part, moves = narrow[own, own], pull[own].copy(), np.empty_like(pull[own])
        scales = coded.scales[:, first // BLOCK]
        minima = None if coded.minima is None else coded.minima[:, first // BLOCK]
        for at in range(BLOCK):
            best = values[first + at] + part[at] / inner[at, at]
            codes[first + at] = grid.codes(best, scales, minima)
            moves[at] = grid.values(codes[first + at], scales, minima) - values[first + at]
            part[at + 1 :] -= inner[at + 1 :, at, None] * moves[at]
        pull -= narrow[:, own] @ moves
    return Coded(grid, np.ascontiguousarray(codes.T), coded.scales, coded.minima)


def _zeros(coded: Coded) -> FloatArray:
    """Zero points, float32 [rows, blocks]: integers."""
    assert coded.minima is not None
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(coded.scales == 0, 0, np.rint(-coded.minima / coded.scales)), np.float32)


def _block_sums(values: FloatArray) -> FloatArray:
    return np.asarray(values.reshape(len(values), -1, BLOCK).sum(axis=-1))
