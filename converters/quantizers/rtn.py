"""Round to nearest: each weight alone. Errors may cost more in some columns than in others (an importance matrix)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edge.converters.grids import BLOCK, Coded, Grid
from edge.converters.quantizers.scales import SHRINKS, fit_scales
from edge.types import AnyArray, FloatArray


def nearest(
    weight: FloatArray, grid: Grid, cost: AnyArray, span: int = BLOCK, shrinks: Iterable[float] = SHRINKS
) -> Coded:
    """Round float32 [rows, columns] with the scales that cost least; arguments as in `fit_scales`."""
    scales, minima = fit_scales(weight, grid, cost, span, shrinks)
    low = None if minima is None else np.repeat(minima, BLOCK, axis=1)
    return Coded(grid, grid.codes(weight, np.repeat(scales, BLOCK, axis=1), low), scales, minima)
