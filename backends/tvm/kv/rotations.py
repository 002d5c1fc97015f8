"""Tables of rotary angles, in the order in which kernels read them.

A row holds, for every dimension of a head, cos of its pair's angle, and then −sin (first of a pair) or +sin (second).
Pairs are neighbours: where a model turns halves, weights are packed so. Angles are float64, so that position 10^7 is
as exact as position 10.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import Angles, find_angles
from edge.model.spec import Recipe
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class Rotation:
    """The angles that a model turns queries and keys by: of all layers, or of two kinds of layers."""

    angles: tuple[Angles, ...]
    kinds: tuple[int, ...]  # [layers]: which of `angles`

    def tables(self, positions: AnyArray, head: int) -> FloatArray:
        """float32 [kinds, positions, 2, head]."""
        return np.stack([rope_table(positions, each.radians, head, each.magnitude) for each in self.angles])

    def turn(self, keys: FloatArray, by: AnyArray) -> FloatArray:
        """Keys float32 [heads of all layers, n, head], row i turned by `by[i]` more positions."""
        layers = keys.reshape(len(self.kinds), -1, *keys.shape[1:])
        turned = np.empty_like(layers)
        for kind, each in enumerate(self.angles):
            chosen = np.equal(self.kinds, kind)
            turned[chosen] = _turn(layers[chosen], by, each.radians)
        return turned.reshape(keys.shape)

    def turn_head(self, layer: int, keys: FloatArray, by: AnyArray) -> FloatArray:
        """The same for one head of a layer, keys float32 [n, head]."""
        return _turn(keys, by, self.angles[self.kinds[layer]].radians)

    def less(self, other: Rotation) -> Rotation:
        """What turns keys that `other` has turned to where this would have turned them."""
        pairs = zip(self.angles, other.angles, strict=True)
        return replace(self, angles=tuple(Angles(ours.radians - theirs.radians, 1.0) for ours, theirs in pairs))


def find_rotation(file: GGUFFile, recipe: Recipe, *, long: bool = False) -> Rotation:
    """long: of texts for which longrope has factors of its own. Learned positions turn nothing."""
    angles = tuple(find_angles(file, rope, long=long) for rope in recipe.ropes) or (Angles(np.zeros(0), 1.0),)
    return Rotation(angles, tuple(recipe.rope_of(layer) for layer in range(len(recipe.windows))))


def rope_table(positions: AnyArray, radians: AnyArray, head: int, magnitude: float = 1.0) -> FloatArray:
    """float32 [positions, 2, head]. Dimensions beyond those that turn keep cos 1 and sin 0."""
    angles = positions[:, None].astype(np.float64) * radians
    table = np.zeros((len(positions), 2, head), np.float32)
    table[:, 0] = 1
    width = 2 * radians.size
    table[:, 0, 0:width:2] = table[:, 0, 1:width:2] = magnitude * np.cos(angles)
    table[:, 1, 1:width:2] = magnitude * np.sin(angles)
    table[:, 1, 0:width:2] = -table[:, 1, 1:width:2]
    return table


def _turn(keys: FloatArray, by: AnyArray, radians: AnyArray) -> FloatArray:
    table = rope_table(by, radians, keys.shape[-1])
    swapped = keys.reshape(*keys.shape[:-1], -1, 2)[..., ::-1].reshape(keys.shape)
    return np.asarray(keys * table[:, 0] + swapped * table[:, 1])
