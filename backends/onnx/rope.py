"""Rotary angles for ONNX Runtime, which turns value i of a head with value i + head / 2.

Angles are float64, so that position 10^7 is as exact as position 10.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import find_angles
from edge.model.spec import ModelSpec
from edge.model.tensors import find_recipe
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class Turning:
    """One RoPE of a model, for whole heads: radians per position, float64 [head / 2], and what some models multiply
    cosines and sines by, float64 [head / 2]. Pairs that a model leaves as they are have 0 and 1."""

    radians: AnyArray
    magnitudes: AnyArray

    def tables(self, positions: AnyArray) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines, float32 [positions, head / 2]."""
        angles = positions[:, None].astype(np.float64) * self.radians
        cos, sin = ((self.magnitudes * f(angles)).astype(np.float32) for f in (np.cos, np.sin))
        return cos, sin


@dataclass(frozen=True)
class Ropes:
    """What a model turns queries and keys by: one turning for all layers, two kinds, or none (learned positions)."""

    turnings: tuple[Turning, ...]
    kinds: tuple[int, ...]  # [layers]: which of them

    def of(self, layer: int) -> Turning | None:
        return self.turnings[self.kinds[layer]] if self.turnings else None

    def turn(self, keys: FloatArray, by: AnyArray) -> FloatArray:
        """Keys that are in the cache, float32 [layers, KV heads, n, head], row i by `by[i]` more positions."""
        turned = np.array(keys)
        for kind, turning in enumerate(self.turnings):
            layers = np.flatnonzero(np.equal(self.kinds, kind))
            turned[layers] = turn(keys[layers], *_unmagnified(turning).tables(by))
        return turned

    def turn_head(self, layer: int, keys: FloatArray, by: AnyArray) -> FloatArray:
        """The same for one head of a layer, keys float32 [n, head]."""
        turning = self.of(layer)
        return turn(keys, *_unmagnified(turning).tables(by)) if turning else keys

    def less(self, other: Ropes) -> Ropes:
        """What turns keys that `other` has turned to where these would have turned them."""
        pairs = zip(self.turnings, other.turnings, strict=True)
        turnings = (Turning(ours.radians - theirs.radians, ours.magnitudes) for ours, theirs in pairs)
        return Ropes(tuple(turnings), self.kinds)


def find_ropes(file: GGUFFile, spec: ModelSpec, *, long: bool = False) -> Ropes:
    """long: of texts for which longrope has factors of its own. Raises ModelFormatError as `find_angles` does."""
    recipe, turnings = find_recipe(spec), []
    for rope in recipe.ropes:
        angles, half = find_angles(file, rope, long=long), spec.head_dim // 2
        radians, magnitudes = np.zeros(half), np.ones(half)
        radians[: angles.radians.size], magnitudes[: angles.radians.size] = angles.radians, angles.magnitude
        turnings.append(Turning(radians, magnitudes))
    return Ropes(tuple(turnings), tuple(recipe.rope_of(layer) for layer in range(spec.layers)))


def turn(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """x float32 [..., n, head], turned by cosines and sines [n, head / 2]."""
    half = x.shape[-1] // 2
    one, other = x[..., :half], x[..., half:]
    return np.concatenate([one * cos - other * sin, one * sin + other * cos], axis=-1)


def _unmagnified(turning: Turning) -> Turning:
    """Keys in the cache are magnified already."""
    return Turning(turning.radians, np.ones_like(turning.magnitudes))
