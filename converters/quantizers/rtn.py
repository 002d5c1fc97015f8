"""Round to nearest: each weight alone, with the scale of each block that costs least.

The cost of an error e of a block is eᵀHe, where H = XᵀX of its inputs, or Σ h·e² with H's diagonal (an importance
matrix), so that errors cost more in some columns than in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from edge.converters.quantizers import lattice
from edge.converters.quantizers.ggml_rows import K_QUANTS, quantize_rows
from edge.errors import UnsupportedError
from edge.formats.blocks import BLOCK, TYPE_IDS, Grid, QuantizedMatrix, find_grid, half, inverse, zero_scale
from edge.types import AnyArray, FloatArray

SHRINKS = tuple(np.linspace(1.1, 0.6, 21, dtype=np.float32))  # shares of the range that fits all values
FEW = SHRINKS[::2]  # where a block's loss is expensive to compute: least squares refine the result
Pair = tuple[FloatArray, FloatArray | None]


def quantize(values: FloatArray, kind: str, codes: lattice.Codes | None = None) -> AnyArray:
    """Round float32 [rows, n] to the nearest values of a block type: uint8 [rows, bytes of n values]. Raises
    UnsupportedError, and MissingExtraError for K-quants without llama.cpp.

    Blocks that Q4_0 can hold as they are keep their codes (`lattice`). codes: these codes, if they are known.
    """
    if kind == "IQ4_NL":  # the one plain type that gguf does not round to
        return nearest(values, find_grid(kind), np.ones(values.shape[1])).data
    if kind in K_QUANTS:
        return quantize_rows(values, kind)
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize as plain

    try:
        data = plain(np.ascontiguousarray(values, np.float32), GGMLQuantizationType(TYPE_IDS[kind]))
    except (KeyError, NotImplementedError):
        raise UnsupportedError(f"plain rounding to {kind} is not known here") from None
    data = np.ascontiguousarray(data).view(np.uint8).reshape(len(values), -1)
    if kind == lattice.KIND:
        matrix, kept = codes or lattice.find_codes(np.asarray(values, np.float32))
        by_block = (*kept.shape, -1)
        data = np.where(kept[..., None], matrix.data.reshape(by_block), data.reshape(by_block)).reshape(data.shape)
    return np.asarray(data)


def nearest(
    weight: FloatArray, grid: Grid, cost: AnyArray, group_size: int = BLOCK, shrinks: Sequence[float] = SHRINKS
) -> QuantizedMatrix:
    """Round float32 [rows, columns] with the scales that cost least; arguments as in `fit_scales`."""
    scales, minima = fit_scales(weight, grid, cost, group_size, shrinks)
    low = None if minima is None else np.repeat(minima, BLOCK, axis=1)
    return QuantizedMatrix(grid, grid.codes(weight, np.repeat(scales, BLOCK, axis=1), low), scales, minima)


@np.errstate(all="ignore")  # of damaged weights, which callers refuse
def fit_scales(
    weight: FloatArray, grid: Grid, cost: AnyArray, group_size: int = BLOCK, shrinks: Sequence[float] = SHRINKS
) -> Pair:
    """Fit scales and minima (or None), float32 [rows, blocks], to weight [rows, columns].

    cost: [columns], or [blocks, BLOCK, BLOCK] for whole blocks. group_size: values that share a scale, a multiple of
    BLOCK; a row's last group may be smaller. shrinks: the fractions of the values' range that are tried. Costs of
    whole blocks refine the best of them by least squares.
    """
    rows, columns = weight.shape
    blocks, cost = weight.reshape(rows, columns // BLOCK, BLOCK), cost.astype(np.float32)
    candidates = _candidates(blocks, grid, group_size, shrinks)

    def loss(scales: Pair) -> FloatArray:
        return _group_sums(_losses(_error(blocks, grid, scales), cost), group_size)

    best = next(candidates)
    least = loss(best)
    for new in candidates:
        found = loss(new)
        best, least = _where(found < least, new, best), np.minimum(found, least)
    if cost.ndim > 1:
        new = _least_squares(blocks, grid, best, cost, group_size)
        best = _where(loss(new) < least, new, best)
    return best


def _error(blocks: FloatArray, grid: Grid, scales: Pair) -> FloatArray:
    """The errors of blocks of weights, [rows, blocks, BLOCK]."""
    low = None if scales[1] is None else scales[1][..., None]
    error = grid.nearest(blocks, inverse(scales[0])[..., None], low)
    error *= scales[0][..., None]
    error -= blocks if low is None else blocks - low
    return error


def _least_squares(blocks: FloatArray, grid: Grid, best: Pair, cost: AnyArray, group_size: int) -> Pair:
    """The best scales for the codes that the scales in `best` give; zero points stay."""
    scales, minima = best
    inverses = inverse(scales)
    steps = grid.nearest(blocks, inverses[..., None], None if minima is None else minima[..., None])
    zeros = None if minima is None else np.rint(-minima * inverses)
    if zeros is not None:
        steps -= zeros[..., None]
    weighted = _weighted(steps, cost)
    products, squares = (_group_sums((weighted * each).sum(axis=-1), group_size) for each in (blocks, steps))
    fitted = products * inverse(squares)
    if zeros is None:
        return half(fitted), None
    fitted = zero_scale(fitted, len(grid.levels))
    return fitted, -fitted * zeros


def _where(better: AnyArray, new: Pair, old: Pair) -> Pair:
    low = None if new[1] is None or old[1] is None else np.where(better, new[1], old[1])
    return np.where(better, new[0], old[0]), low


def _weighted(errors: FloatArray, cost: AnyArray) -> FloatArray:
    """H·e of each block, [rows, blocks, BLOCK]."""
    if cost.ndim == 1:
        return np.asarray(errors * cost.reshape(-1, BLOCK))
    return np.swapaxes(np.matmul(np.swapaxes(errors, 0, 1), cost), 0, 1)


def _losses(error: FloatArray, cost: AnyArray) -> FloatArray:
    """The cost of each block, [rows, blocks]."""
    return np.asarray(np.einsum("rbc,rbc->rb", _weighted(error, cost), error))


def _candidates(blocks: FloatArray, grid: Grid, group_size: int, shrinks: Sequence[float]) -> Iterator[Pair]:
    """Candidate scales of all blocks [rows, blocks], rounded to float16; blocks of a group get the same."""
    low, high = (_groups(getattr(blocks, what)(axis=-1), group_size, what) for what in ("min", "max"))
    bottom, top = grid.levels[0], grid.levels[-1]
    if grid.minima:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        for shrink in shrinks:
            scales = zero_scale((high - low) * shrink / top, len(grid.levels))
            with np.errstate(divide="ignore", invalid="ignore"):
                zeros = np.where(scales > 0, np.clip(np.rint(-low * shrink / scales), 0, top), np.float32(0))
            yield scales, -scales * zeros
        return
    extreme = np.where(-low > high, low, high)
    for shrink in shrinks:
        yield half(extreme * shrink / bottom), None
        if grid.kind != "Q8_0":
            yield half(extreme * shrink / top), None


def _groups(numbers: FloatArray, group_size: int, what: str) -> FloatArray:
    """The least or greatest value among the blocks that share a scale, [rows, blocks]."""
    if group_size == BLOCK:
        return numbers
    starts = np.arange(0, numbers.shape[1], group_size // BLOCK)
    function = np.minimum if what == "min" else np.maximum
    return _repeat(function.reduceat(numbers, starts, axis=1), numbers.shape[1], group_size)


def _group_sums(losses: FloatArray, group_size: int) -> FloatArray:
    if group_size == BLOCK:
        return losses
    starts = np.arange(0, losses.shape[1], group_size // BLOCK)
    return _repeat(np.add.reduceat(losses, starts, axis=1), losses.shape[1], group_size)


def _repeat(groups: FloatArray, blocks: int, group_size: int) -> FloatArray:
    return np.repeat(groups, group_size // BLOCK, axis=1)[:, :blocks]
