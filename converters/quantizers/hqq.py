"""HQQ (Badri and Shaji, 2023, "Half-Quadratic Quantization of Large Machine Learning Models"): no calibration data.

Errors are measured by |e|^p with p < 1, which forgives outliers. Two steps alternate: shrinkage finds the part e of the
error that is due to outliers; scales and zero points are fitted to the weights without e.
"""

from __future__ import annotations

import numpy as np

from edge.converters.quantizers.rtn import SHRINKS, fit_scales
from edge.formats.blocks import BLOCK, Grid, QuantizedMatrix, half, zero_scale
from edge.types import AnyArray, FloatArray

_NORM, _ROUNDS = 0.7, 20
_BETA, _GROWTH = 10.0, 1.01  # how strictly e follows the error, and how this grows


def hqq(weight: FloatArray, grid: Grid, group_size: int = BLOCK) -> QuantizedMatrix:
    """Round float32 [rows, columns]. group_size: values that share a scale."""
    scales, minima = fit_scales(weight, grid, np.ones(weight.shape[1]), group_size, (SHRINKS[0], 1.0))
    best = _quantized(weight, grid, scales, minima)
    least = _loss(weight, best, group_size)
    rounded, beta = best, _BETA
    for _ in range(_ROUNDS):
        outliers = _shrink(weight - rounded.values, beta)
        beta *= _GROWTH
        scales, minima = _fitted(weight - outliers, rounded, group_size)
        rounded = _quantized(weight, grid, scales, minima)
        loss = _loss(weight, rounded, group_size)
        better = loss < least
        least = np.where(better, loss, least)
        low = None if minima is None or best.minima is None else np.where(better, minima, best.minima)
        best = _quantized(weight, grid, np.where(better, scales, best.scales), low)
    return best


def _shrink(error: FloatArray, beta: float) -> FloatArray:
    """The proximal operator of |e|^p."""
    size = np.abs(error)
    with np.errstate(divide="ignore"):
        return np.asarray(np.sign(error) * np.maximum(size - size ** (_NORM - 1) / np.float32(beta), 0), np.float32)


def _fitted(weight: FloatArray, rounded: QuantizedMatrix, group_size: int) -> tuple[FloatArray, FloatArray | None]:
    """Refit for fixed codes, by least squares: zero points for the scales, then scales for the zero points."""
    levels, top = rounded.grid.levels[rounded.codes], rounded.grid.levels[-1]
    if rounded.minima is None:
        scales = _sums(weight * levels, group_size) / np.maximum(_sums(levels * levels, group_size), np.float32(1))
        return half(scales), None
    with np.errstate(divide="ignore", invalid="ignore"):
        inverse = np.where(rounded.scales == 0, np.float32(0), 1 / rounded.scales)
    offsets = levels - weight * np.repeat(inverse, BLOCK, axis=1)
    wanted = _sums(offsets, group_size) / _sums(np.ones_like(weight), group_size)
    zeros = np.clip(np.rint(wanted), 0, top)
    steps = levels - np.repeat(zeros, BLOCK, axis=1)
    scales = _sums(weight * steps, group_size) / np.maximum(_sums(steps * steps, group_size), np.float32(1))
    scales = zero_scale(scales.astype(np.float32), len(rounded.grid.levels))
    return scales, np.asarray(-scales * zeros, np.float32)


def _quantized(weight: FloatArray, grid: Grid, scales: FloatArray, minima: FloatArray | None) -> QuantizedMatrix:
    low = None if minima is None else np.repeat(minima, BLOCK, axis=1)
    return QuantizedMatrix(grid, grid.codes(weight, np.repeat(scales, BLOCK, axis=1), low), scales, minima)


def _loss(weight: FloatArray, rounded: QuantizedMatrix, group_size: int) -> FloatArray:
    return _sums(np.abs(weight - rounded.values) ** np.float32(_NORM), group_size)


def _sums(values: FloatArray, group_size: int) -> AnyArray:
    """Sums over the values that share a scale, repeated for each of their blocks: [rows, blocks]."""
    sums = values.reshape(len(values), -1, BLOCK).sum(axis=-1)
    starts = np.arange(0, sums.shape[1], group_size // BLOCK)
    return np.repeat(np.add.reduceat(sums, starts, axis=1), group_size // BLOCK, axis=1)[:, : sums.shape[1]]
