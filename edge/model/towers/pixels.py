"""Pixels as encoders read them, value by value those of transformers' image processors with Pillow."""

from __future__ import annotations

from math import sqrt
from typing import Literal, cast

import numpy as np

from edge.types import AnyArray, FloatArray

Filter = Literal["bilinear", "bicubic", "lanczos"]


def resize(pixels: AnyArray, height: int, width: int, filter: Filter) -> AnyArray:
    """Resize a picture, uint8 [height, width, 3], by Pillow."""
    from PIL import Image  # here: few runs see pictures

    if pixels.shape[:2] == (height, width):
        return pixels
    kind = Image.Resampling[filter.upper()]
    return np.asarray(Image.fromarray(pixels).resize((width, height), kind))


def normalized(pixels: AnyArray, mean: tuple[float, ...], std: tuple[float, ...]) -> FloatArray:
    """(x / 255 − mean) / std of each colour, float32 [height, width, 3]."""
    values = (np.arange(256) * (1 / 255)).astype(np.float32)[:, None]
    table = (values - np.array(mean, np.float32)) / np.array(std, np.float32)
    return cast(FloatArray, np.take_along_axis(table, pixels.reshape(-1, 3), axis=0).reshape(pixels.shape))


def patches_of(values: FloatArray, patch: int) -> FloatArray:
    """Patches of `patch` × `patch` pixels, row by row, [n, 3 · patch²]: all red values of a patch, green, blue."""
    rows, columns = values.shape[0] // patch, values.shape[1] // patch
    parts = values.reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3)
    return np.asarray(parts.reshape(rows * columns, -1))


def joined(states: FloatArray, rows: int, columns: int, side: int) -> FloatArray:
    """Join `side` × `side` neighbours of a grid, [rows · columns, n], row by row: [their number, side² · n]."""
    parts = states.reshape(rows // side, side, columns // side, side, -1).swapaxes(1, 2)
    return np.asarray(parts.reshape(rows * columns // side**2, -1))


def gelu_erf(x: FloatArray) -> FloatArray:
    """x / 2 · (1 + erf(x / √2)), by the fit 7.1.26 of Abramowitz and Stegun, whose error is 1.5e−7 at most."""
    size = np.abs(x) * np.float32(sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * size)
    fit = np.zeros_like(t)
    for each in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        fit = (fit + np.float32(each)) * t
    erf = np.copysign(1 - fit * np.exp(-np.square(size)), x)
    return np.asarray(x * np.float32(0.5) * (1 + erf))
