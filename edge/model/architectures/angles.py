"""RoPE's frequencies with the scalings that extend a model's context, and the temperature of queries."""

from __future__ import annotations

import math

import numpy as np

from edge.errors import ModelFormatError
from edge.formats.gguf import GGUFFile
from edge.model.cores import Rope, Temperature
from edge.records import dataclass
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class Angles:
    """RoPE's angles."""

    radians: AnyArray  # float64 [dim / 2], per position
    magnitude: float  # factor of cosines and sines, for queries and keys alike
    first: int = 0  # the first rotated value of a head
    components: tuple[int, ...] = ()  # of the position, by which pairs go; empty: positions have one
    apart: tuple[int, ...] = ()  # numbers of pairs of sections with values of their own (`Rope.apart`)


def find_angles(file: GGUFFile, rope: Rope, *, long: bool = False) -> Angles:
    """The angles of a model. long: for texts beyond the original context, for which LongRoPE has separate factors.

    Raises ModelFormatError if factors are not positive numbers, or for YaRN with a base of 1 or less.
    """
    if not rope.dim:
        return Angles(np.zeros(0), 1.0)
    parts = rope.sections if rope.restarts else (rope.dim // 2,)
    powers: AnyArray = rope.base ** -np.concatenate([np.arange(size) / size for size in parts])
    magnitude = rope.magnitude
    if rope.scaling == "linear":
        powers = powers / rope.factor
    elif rope.scaling == "yarn":
        if rope.base <= 1:
            raise ModelFormatError(f"{file.path}: yarn cannot stretch RoPE with a base of {rope.base:g}")
        stretched = _yarn_share(rope)
        powers = powers / rope.factor * stretched + powers * (1 - stretched)
        magnitude *= yarn_magnitude(rope.factor) / yarn_magnitude(rope.factor, rope.log_multiplier)
    for name in (f"rope_factors_{'long' if long else 'short'}", "rope_freqs"):
        if not rope.has_freqs and name == "rope_freqs":
            continue
        if (info := file.tensors.get(f"{name}.weight")) is not None:
            factors = file.tensor_bytes(info).view(np.float32)
            if factors.size != powers.size or not (np.isfinite(factors) & (factors > 0)).all():
                raise ModelFormatError(f"{file.path}: {name} must be {powers.size} positive numbers")
            powers = powers / factors
    return Angles(powers, magnitude, rope.first, rope.components, rope.sections if rope.apart else ())


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """YaRN's factor of cosines and sines (arXiv:2309.00071, section 3.4)."""
    return 1 + 0.1 * multiplier * math.log(max(factor, 1.0))


def temperatures(temperature: Temperature, positions: AnyArray) -> FloatArray:
    """Factors of the queries at these positions, float32 [n]."""
    return np.asarray(1 + temperature.slope * np.log1p(positions // temperature.period), np.float32)


def _yarn_share(rope: Rope) -> AnyArray:
    """The extent to which each pair is stretched, [dim / 2]: 0 for short wavelengths, 1 for long ones."""

    def pair_with_rotations(count: float) -> float:
        return rope.dim * math.log(rope.original_context / (count * 2 * math.pi)) / (2 * math.log(rope.base))

    first = max(0, math.floor(pair_with_rotations(rope.beta_fast)))
    last = min(rope.dim - 1, math.ceil(pair_with_rotations(rope.beta_slow)))
    ramp: AnyArray = (np.arange(rope.dim // 2) - first) / max(0.001, last - first)
    return np.clip(ramp, 0, 1)
