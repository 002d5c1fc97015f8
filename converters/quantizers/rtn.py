"""Round to nearest: each weight alone. Errors may cost more in some columns than in others (an importance matrix)."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edge.converters.quantizers.scales import SHRINKS, fit_scales
from edge.errors import UnsupportedError
from edge.formats.blocks import BLOCK, TYPE_IDS, Grid, QuantizedMatrix, find_grid
from edge.types import AnyArray, FloatArray


def quantize(values: FloatArray, kind: str) -> AnyArray:
    """Round float32 [rows, n] to the nearest values of a type: uint8 [rows, bytes of n values]. Raises
    UnsupportedError."""
    if kind == "IQ4_NL":  # the one plain type that gguf does not round to
        return nearest(values, find_grid(kind), np.ones(values.shape[1])).data
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize as plain

    try:
        data = plain(np.ascontiguousarray(values, np.float32), GGMLQuantizationType(TYPE_IDS[kind]))
    except (KeyError, NotImplementedError):
        raise UnsupportedError(f"plain rounding to {kind} is not known here") from None
    return np.ascontiguousarray(data).view(np.uint8).reshape(len(values), -1)


def nearest(
    weight: FloatArray, grid: Grid, cost: AnyArray, group_size: int = BLOCK, shrinks: Iterable[float] = SHRINKS
) -> QuantizedMatrix:
    """Round float32 [rows, columns] with the scales that cost least; arguments as in `fit_scales`."""
    scales, minima = fit_scales(weight, grid, cost, group_size, shrinks)
    low = None if minima is None else np.repeat(minima, BLOCK, axis=1)
    return QuantizedMatrix(grid, grid.codes(weight, np.repeat(scales, BLOCK, axis=1), low), scales, minima)
