"""Refine a quantized matrix, block by block: a better scale for its codes, then better codes one column at a time.

Every step lowers tr((W − Ŵ)H(W − Ŵ)ᵀ), the squared error of the matrix's outputs, while all other blocks stay.
"""

from __future__ import annotations

import numpy as np

from edge.formats.blocks import BLOCK, Grid, QuantizedMatrix, half, inverse, zero_scale
from edge.types import FloatArray

_SWEEPS = 2


@np.errstate(all="ignore")  # of damaged weights, which callers refuse
def polish(
    weight: FloatArray, quantized: QuantizedMatrix, hessian: FloatArray, group_size: int = BLOCK, sweeps: int = _SWEEPS
) -> QuantizedMatrix:
    """Refine `quantized`. weight: float32 [rows, columns]; hessian: `damped`, float32 [columns, columns].

    group_size: values that share a scale; scales shared by several blocks stay.
    """
    grid = quantized.grid
    levels = np.ascontiguousarray(grid.levels[quantized.codes].T)  # [columns, rows]: a column is contiguous
    errors = np.ascontiguousarray((weight - quantized.values).T)
    exact, scales = np.ascontiguousarray(weight.T), np.array(quantized.scales.T, order="C")
    minima = None if quantized.minima is None else np.array(quantized.minima.T, order="C")
    for _ in range(sweeps):
        for block, first in enumerate(range(0, len(hessian), BLOCK)):
            own = slice(first, first + BLOCK)
            low = None if minima is None else minima[block]
            pull, inner = hessian[own] @ errors, hessian[own, own]  # the negative gradient of each weight
            if group_size == BLOCK:
                moved = _fit(grid, levels[own], pull, inner, scales[block], low)
                errors[own] -= moved
                pull -= inner @ moved
            _descend(grid, exact[own], levels[own], errors[own], pull, inner, scales[block], low)
    codes = grid.codes(levels, np.ones(1, np.float32))
    return QuantizedMatrix(
        grid, np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T),
        None if minima is None else np.ascontiguousarray(minima.T),
    )  # fmt: skip


def _fit(
    grid: Grid, levels: FloatArray, pull: FloatArray, inner: FloatArray, scales: FloatArray, minima: FloatArray | None
) -> FloatArray:
    """Fit a block's scales, in place, by least squares; codes and zero points stay. Returns how far weights moved."""
    zeros = np.float32(0) if minima is None else np.rint(-minima * inverse(scales))
    steps = levels - zeros  # Ŵ = scale · steps
    curvature = np.einsum("cr,cr->r", inner @ steps, steps)
    wanted = scales + np.einsum("cr,cr->r", steps, pull) * inverse(curvature)
    # Errors are quadratic in the scale, so that the representable scale nearest to the best one costs least.
    fitted = half(wanted) if minima is None else zero_scale(wanted, len(grid.levels))
    moved = steps * (fitted - scales)
    scales[:] = fitted
    if minima is not None:
        minima[:] = -fitted * zeros
    return np.asarray(moved)


def _descend(
    grid: Grid, exact: FloatArray, levels: FloatArray, errors: FloatArray, pull: FloatArray, inner: FloatArray,
    scales: FloatArray, minima: FloatArray | None,
) -> None:  # fmt: skip
    """Round each column of a block, in place, to its best values while the others stay."""
    inverses, moved = inverse(scales), np.empty_like(errors)
    for at in range(BLOCK):
        best = exact[at] - errors[at] + (pull[at] - inner[at, :at] @ moved[:at]) / inner[at, at]
        levels[at] = grid.nearest(best, inverses, minima)
        after = exact[at] - levels[at] * scales
        if minima is not None:
            after -= minima
        moved[at] = errors[at] - after
        errors[at] = after
