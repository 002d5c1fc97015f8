"""GPTQ (arXiv:2210.17323): round one column after the other, and let the remaining columns compensate for each error.

With H = XᵀX, the Cholesky factor U of H⁻¹ = UᵀU holds the inverses of H without its first columns. A block's scales are
fitted when the block is reached, to weights that already compensate for earlier errors. The cost of an error in the
block, after later columns have compensated for it, is (UᵀU)⁻¹ of the block.
"""

from __future__ import annotations

import numpy as np

from edge.converters.quantizers.rtn import fit_scales
from edge.formats.blocks import BLOCK, Grid, QuantizedMatrix
from edge.types import AnyArray, FloatArray

DAMPING = 0.3  # of H's diagonal, added to it
_LEAST = 1e-4  # of its mean, for inputs that are always zero


def gptq(
    weight: FloatArray, hessian: AnyArray, grid: Grid, *, act_order: bool = True, group_size: int = BLOCK
) -> QuantizedMatrix:
    """Quantize weight, float32 [rows, columns], for inputs with hessian XᵀX, float64 [columns, columns].

    act_order: round the blocks with the largest inputs first, and the largest columns of each block first.
    """
    order = _order(np.diag(hessian), group_size) if act_order else np.arange(len(hessian))
    factor = inverse_factor(hessian[np.ix_(order, order)])
    left = np.ascontiguousarray(weight[:, order].T)  # [columns, rows]: a column is contiguous
    codes = np.empty(left.shape, np.uint8)
    blocks = len(order) // BLOCK
    scales, minima = np.zeros((blocks, len(weight)), np.float32), np.zeros((blocks, len(weight)), np.float32)
    for start in range(0, len(order), group_size):
        stop = min(start + group_size, len(order))
        own = np.linalg.inv(factor[start:stop, start:stop])
        costs = diagonal_blocks(own @ own.T)
        found = fit_scales(left[start:stop].T, grid, costs, group_size)
        here = slice(start // BLOCK, stop // BLOCK)
        scales[here] = found[0].T
        if found[1] is not None:
            minima[here] = found[1].T
        for first in range(start, stop, BLOCK):
            _round_block(left, codes, first, factor, grid, scales[first // BLOCK], minima[first // BLOCK])
    back = np.argsort(order)
    whose = np.argsort(order[::BLOCK] // BLOCK)  # blocks stay whole
    return QuantizedMatrix(
        grid, np.ascontiguousarray(codes[back].T), scales[whose].T, minima[whose].T if grid.minima else None
    )


def shift(hessian: AnyArray, crossed: AnyArray) -> FloatArray:
    """S, float32 [columns, columns]: W·S brings outputs on the rounded model's inputs nearest to the exact model's
    outputs (GPTAQ, arXiv:2504.02692).

    hessian: XᵀX of the rounded model's inputs; crossed: XᵀY with the exact model's Y.
    """
    extra = damping(hessian)
    return np.asarray(np.linalg.solve(hessian + extra, crossed + extra).T, np.float32)


def inverse_factor(hessian: AnyArray) -> FloatArray:
    """The upper Cholesky factor of the damped inverse, float32. Inputs that are always zero count as small ones."""
    damped = hessian + damping(hessian)
    inverse = np.linalg.inv(damped)
    # The upper factor U with UᵀU = inverse is the transposed lower one.
    return np.asarray(np.linalg.cholesky((inverse + inverse.T) / 2).T, np.float32)


def damping(hessian: AnyArray) -> AnyArray:
    """The diagonal matrix added to a Hessian, against overfitting to the calibration text.

    The paper adds a share of the mean diagonal. A share of each input's own value damps small and large inputs alike,
    and generalizes better to other texts.
    """
    diagonal = np.diag(hessian)
    return np.asarray(np.diag(DAMPING * diagonal + _LEAST * (diagonal.mean() or 1.0)))


def _round_block(
    left: FloatArray,
    codes: AnyArray,
    first: int,
    factor: FloatArray,
    grid: Grid,
    scales: FloatArray,
    minima: FloatArray,
) -> None:
    """Round the BLOCK columns from `first` on, and compensate within the block, then in the columns behind it."""
    last = first + BLOCK
    part, own = left[first:last].copy(), factor[first:last, first:last]
    errors = np.empty_like(part)
    low = minima if grid.minima else None
    for at in range(BLOCK):
        codes[first + at] = grid.codes(part[at], scales, low)
        errors[at] = (part[at] - grid.values(codes[first + at], scales, low)) / own[at, at]
        part[at + 1 :] -= own[at, at + 1 :, None] * errors[at]
    left[last:] -= factor[first:last, last:].T @ errors


def diagonal_blocks(hessian: AnyArray) -> AnyArray:
    """The blocks on the diagonal, [blocks, BLOCK, BLOCK]."""
    return np.stack([hessian[at : at + BLOCK, at : at + BLOCK] for at in range(0, len(hessian), BLOCK)])


def _order(diagonal: AnyArray, group_size: int) -> AnyArray:
    """Columns, largest first, group by group; an incomplete last group stays last."""
    groups = [np.arange(at, min(at + group_size, len(diagonal))) for at in range(0, len(diagonal), group_size)]
    ragged = [groups.pop()] if len(groups[-1]) < group_size else []
    groups.sort(key=lambda columns: -float(diagonal[columns].sum()))
    inner = []
    for columns in groups + ragged:
        for at in range(0, len(columns), BLOCK):
            block = columns[at : at + BLOCK]
            inner.append(block[np.argsort(-diagonal[block], kind="stable")])
    return np.concatenate(inner)
