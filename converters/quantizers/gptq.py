"""GPTQ (arXiv:2210.17323): round one column after the other, and let the remaining columns compensate for each error.

Implemented as LDLQ, which gives the same result (QuIP, arXiv:2307.13304): with H = XᵀX = (U + I) D (U + I)ᵀ, U strictly
upper, each column is rounded to the nearest of w + e·U, where e are the errors of the columns before it. That takes no
inverse, and reads earlier errors once a block. A block's scales are fitted when the block is reached, to weights that
compensate for earlier errors. The cost of an error in the block, after later columns have compensated for it, is the
block's own (U + I) D (U + I)ᵀ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.converters.quantizers.rtn import FEW, fit_scales
from edge.formats.blocks import BLOCK, Grid, QuantizedMatrix, inverse
from edge.types import AnyArray, FloatArray

_DAMPING, _PER_TOKEN = 0.3, 8.0  # share of H's diagonal that is added to it: max(first, second · columns / tokens)
_LEAST = 1e-4  # of the diagonal's mean, also added, for inputs that are always zero


@dataclass(frozen=True)
class Prepared:
    """The column order and Cholesky factor that matrices with the same inputs share."""

    order: AnyArray  # columns, as they are rounded
    factor: FloatArray  # V = (U + I) √D of the damped H in this order, float32 [columns, columns]
    group_size: int


def prepare(hessian: FloatArray, *, act_order: bool = True, group_size: int = BLOCK) -> Prepared:
    """Prepare rounding for inputs with this `damped` hessian, float32 [columns, columns].

    act_order: round the blocks with the largest inputs first, and the largest columns of each block first.
    """
    order = _order(np.diag(hessian), group_size) if act_order else np.arange(len(hessian))
    backwards = order[::-1]  # the upper factor is the lower one of columns in reverse
    factor = np.linalg.cholesky(hessian[np.ix_(backwards, backwards)])[::-1, ::-1]
    return Prepared(order, np.ascontiguousarray(factor, np.float32), group_size)


@np.errstate(all="ignore")  # of damaged weights, which callers refuse
def gptq(weight: FloatArray, inputs: Prepared, grid: Grid) -> QuantizedMatrix:
    """Quantize weight, float32 [rows, columns]."""
    order, factor, group_size = inputs.order, inputs.factor, inputs.group_size
    passed = np.ascontiguousarray((factor / np.diag(factor)).T)  # row i: shares of earlier errors that column i gets
    exact = np.ascontiguousarray(weight[:, order].T)  # [columns, rows]: a column is contiguous
    levels, errors = np.empty_like(exact), np.empty_like(exact)
    blocks = len(order) // BLOCK
    scales, minima = np.zeros((blocks, len(weight)), np.float32), np.zeros((blocks, len(weight)), np.float32)
    for start in range(0, len(order), group_size):
        stop = min(start + group_size, len(order))
        own = factor[start:stop, start:stop]
        wanted = exact[start:stop] + passed[start:stop, :start] @ errors[:start]
        found = fit_scales(wanted.T, grid, diagonal_blocks(own @ own.T), group_size, FEW)
        for at in range(start, stop, BLOCK):
            block, here = at // BLOCK, slice(at, at + BLOCK)
            scales[block] = found[0][:, (at - start) // BLOCK]
            if found[1] is not None:
                minima[block] = found[1][:, (at - start) // BLOCK]
            wanted = exact[here] + passed[here, :at] @ errors[:at]
            low = minima[block] if grid.minima else None
            _round_block(exact[here], wanted, passed[here, here], grid, scales[block], low, levels[here], errors[here])
    back = np.argsort(order)
    whose = np.argsort(order[::BLOCK] // BLOCK)  # blocks stay whole
    codes = grid.codes(levels, np.ones(1, np.float32))
    return QuantizedMatrix(
        grid, np.ascontiguousarray(codes[back].T), scales[whose].T, minima[whose].T if grid.minima else None
    )


def shift(hessian: FloatArray, crossed: FloatArray) -> FloatArray:
    """S, float32 [columns, columns]: with weights W·S, the outputs for the rounded model's inputs are closest to the
    exact model's outputs (GPTAQ, arXiv:2504.02692).

    hessian: `damped`, of the rounded model's inputs X; crossed: Xᵀ(Y − X) with the exact model's Y.
    """
    change = np.linalg.solve(hessian, crossed).T
    np.fill_diagonal(change, change.diagonal() + 1)
    return np.asarray(change)


def damped(hessian: FloatArray, tokens: int) -> FloatArray:
    """XᵀX of this many tokens with a larger diagonal, against overfitting to the calibration text. That also keeps the
    condition number small enough for float32.

    The paper adds a share of the mean diagonal. A share of each input's own value damps small and large inputs alike,
    and generalizes better to other texts. So does a larger share for matrices with more columns, about which the same
    tokens say less. Inputs that are always zero count as small ones.
    """
    diagonal = np.diag(hessian)
    share = max(_DAMPING, _PER_TOKEN * len(hessian) / tokens)
    found = np.array(hessian, np.float32)
    np.fill_diagonal(found, (1 + share) * diagonal + _LEAST * (diagonal.mean() or 1.0))
    return found


def _round_block(
    exact: FloatArray, wanted: FloatArray, passed: FloatArray, grid: Grid, scales: FloatArray,
    minima: FloatArray | None, levels: FloatArray, errors: FloatArray,
) -> None:  # fmt: skip
    """Round a block's columns, [BLOCK, rows], to `levels`, and write their errors.

    wanted: the columns plus the errors of earlier blocks. passed: the shares of errors passed on within the block.
    """
    inverses = inverse(scales)
    for at in range(BLOCK):
        target = wanted[at] + passed[at, :at] @ errors[:at]
        levels[at] = grid.nearest(target, inverses, minima)
        errors[at] = exact[at] - levels[at] * scales
        if minima is not None:
            errors[at] -= minima


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
