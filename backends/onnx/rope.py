"""Rotary angles for ONNX Runtime, which turns value i of a head with value i + head / 2.

Angles are float64, so that position 10^7 is as exact as position 10.
"""

from __future__ import annotations

import numpy as np

from edge.architectures.angles import Angles
from edge.types import AnyArray, FloatArray


def tables(positions: AnyArray, angles: Angles) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines, float32 [positions, head / 2], with the magnitude that some models multiply by."""
    radians = positions[:, None].astype(np.float64) * angles.radians
    cos, sin = ((angles.magnitude * f(radians)).astype(np.float32) for f in (np.cos, np.sin))
    return cos, sin


def turn(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """x float32 [..., n, head], turned by cosines and sines [n, head / 2]."""
    half = x.shape[-1] // 2
    one, other = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)
