"""RoPE: the rotation of queries and keys, when computed and again when cached keys change positions.

Angles are computed in float64, so that position 10^7 is as exact as position 10.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edge.formats.gguf import GGUFFile
from edge.model.architectures.angles import Angles, find_angles
from edge.model.parts.given import interleaved
from edge.model.structure.layers import Network
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_UNROTATED = Angles(np.zeros(0), 1.0)  # of models with learned positions


@dataclass(frozen=True)
class Rotation:
    """A model's RoPE."""

    angles: tuple[Angles, ...]  # of all layers, or of two kinds of layers
    kinds: tuple[int, ...]  # index of each layer's angles, [layers]
    pairs: int  # of the largest head; values after the last pair are not rotated
    halves: bool  # value i pairs with value i + pairs, otherwise 2i with 2i + 1

    def tables(self, kind: int, positions: AnyArray) -> tuple[FloatArray, FloatArray]:
        """Cosines and sines, float32 [n, pairs], of one kind of layers. positions: [n], or [n, components]."""
        angles = self.angles[kind]
        return _tables(angles, positions, self.pairs, 0 if self.halves else angles.first // 2)

    def rotate(self, x: FloatArray, layer: int, positions: AnyArray) -> FloatArray:
        """Rotate a layer's queries or keys, float32 [..., n, head], to `positions`, [n] or [n, components]."""
        return self.apply(x, self.tables(self.kinds[layer], positions), self.kinds[layer])

    def apply(self, x: FloatArray, tables: tuple[FloatArray, FloatArray], kind: int) -> FloatArray:
        """Rotate queries or keys of one kind of layers by its `tables`."""
        if self.halves and (sizes := self.angles[kind].apart):
            ends = np.cumsum(sizes)[:-1]
            sections = zip(
                np.split(x, 2 * ends, axis=-1), *(np.split(each, ends, axis=1) for each in tables), strict=True
            )
            return np.concatenate([rotate(part, cos, sin, halves=True) for part, cos, sin in sections], axis=-1)
        if self.halves and (first := self.angles[kind].first):
            return np.concatenate([x[..., :first], rotate(x[..., first:], *tables, halves=True)], axis=-1)
        return rotate(x, *tables, halves=self.halves)

    def rotate_cached(self, keys: FloatArray, by: AnyArray, layer: int | None = None) -> FloatArray:
        """Rotate cached keys, key i by `by[i]` more positions. Their magnitude is applied already.

        All components of a position move alike. keys: of one layer, float32 [..., n, head], or of all heads of all
        layers, float32 [heads, n, head].
        """
        plain = replace(self, angles=tuple(replace(each, magnitude=1.0, components=()) for each in self.angles))
        tables = [plain.tables(kind, by) for kind in range(len(self.angles))]
        if layer is not None:
            return self.apply(keys, tables[self.kinds[layer]], self.kinds[layer])
        layers = keys.reshape(len(self.kinds), -1, *keys.shape[1:])
        rotated = np.empty_like(layers)
        for kind, table in enumerate(tables):
            chosen = np.equal(self.kinds, kind)
            rotated[chosen] = self.apply(layers[chosen], table, kind)
        return rotated.reshape(keys.shape)

    def of(self, layers: Sequence[int]) -> Rotation:
        """The rotation of these layers alone: `rotate_cached` then takes the heads of these layers."""
        return replace(self, kinds=tuple(self.kinds[layer] for layer in layers))

    def since(self, other: Rotation) -> Rotation:
        """The rotation that changes a key rotated by `other` into one rotated by this."""
        pairs = zip(self.angles, other.angles, strict=True)
        between = (replace(ours, radians=ours.radians - theirs.radians, magnitude=1.0) for ours, theirs in pairs)
        return replace(self, angles=tuple(between))


def find_rotation(
    file: GGUFFile, network: Network, *, halves: bool, head: int | None = None, long: bool = False
) -> Rotation:
    """A model's RoPE. head: values of a head that form pairs (None: the rotated ones). long: with LongRoPE's long
    factors.

    Raises ModelFormatError as `find_angles` does.
    """
    angles = tuple(find_angles(file, rope, long=long) for rope in network.ropes) or (_UNROTATED,)
    kinds = tuple(network.rope_of(layer) for layer in range(len(network.windows)))
    rotated = max(each.radians.size + (0 if halves else each.first // 2) for each in angles)
    return Rotation(angles, kinds, rotated if head is None else head // 2, halves)


def rotate(x: FloatArray, cos: FloatArray, sin: FloatArray, *, halves: bool) -> FloatArray:
    """Rotate x, float32 [..., n, head], by cosines and sines [n, pairs]; pairs as in `Rotation`.

    Heads smaller than the largest use the first pairs.
    """
    pairs = min(cos.shape[-1], x.shape[-1] // 2)
    cos, sin = cos[:, :pairs], sin[:, :pairs]
    ends = (slice(pairs), slice(pairs, 2 * pairs)) if halves else (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
    one, other = (x[..., end] for end in ends)
    rotated = np.array(x)
    rotated[..., ends[0]] = one * cos - other * sin
    rotated[..., ends[1]] = one * sin + other * cos
    return rotated


def _tables(angles: Angles, positions: AnyArray, pairs: int, first: int) -> tuple[FloatArray, FloatArray]:
    """Cosines and sines; pairs that a model does not rotate have cosine 1 and sine 0. first: the first that it does."""
    rotated = slice(first, first + angles.radians.size)
    cos, sin = np.ones((len(positions), pairs), np.float32), np.zeros((len(positions), pairs), np.float32)
    by_pair = positions[:, list(angles.components)] if positions.ndim > 1 else positions[:, None]
    radians = by_pair.astype(np.float64) * angles.radians
    cos[:, rotated], sin[:, rotated] = angles.magnitude * np.cos(radians), angles.magnitude * np.sin(radians)
    return cos, sin


class CacheRope:
    """The rotation of one cache's keys, which with LongRoPE (arXiv:2402.13753) switches between two sets of factors.

    A text within the original context uses the short factors; a longer one uses the long ones from its first token on,
    whatever the cache's size, as in transformers. When a text grows beyond the original context, its cached keys are
    rotated to the long factors. Deeper layers computed them, and their values, under the short factors, where
    transformers' `generate` runs the whole text again; such rows have a key of their own, and no other text reuses
    them.

    suffix: the part of `KVCache.key` for the chosen factors.
    """

    def __init__(
        self, file: GGUFFile, network: Network, positions: int, *, halves: bool, head: int | None = None
    ) -> None:
        """positions: the most that the cache will have. halves, head: as in `find_rotation`."""
        original = next((rope.original_context for rope in network.ropes if rope.has_long), positions)
        self._limit = original if positions > original else None
        self._interleaves = network.halves and not halves
        self._short, self._long = (
            find_rotation(file, network, halves=halves, head=head, long=long) for long in (False, True)
        )
        self.clear()

    def ordered(self, keys: FloatArray, layer: int) -> FloatArray:
        """A layer's rotated keys, [..., head], from the order of the model's file in that of the cache."""
        count = 2 * self.rotation.angles[self.rotation.kinds[layer]].radians.size
        return interleaved(keys, count) if self._interleaves else keys

    def clear(self) -> None:
        """Start a new text in an empty cache."""
        self.rotation, self.suffix = self._short, ""

    def foresight(self, next_position: int) -> int:
        """The number of coming tokens that decides the factors; 0 if they are decided."""
        if self._limit is None or self.rotation is not self._short:
            return 0
        return max(0, self._limit + 1 - next_position)

    def is_outgrown_by(self, positions: int) -> bool:
        """Whether a text of this many positions needs the long factors while the cache uses the short ones."""
        return self._limit is not None and self.rotation is self._short and positions > self._limit

    def lengthen(self, rows: int) -> Rotation:
        """Switch to the long factors. Returns the rotation for the cache's `rows`, which have the short ones."""
        self.rotation, self.suffix = self._long, ":lengthened" if rows else ":long"
        return self._long.since(self._short)

    def adopt(self, key: str, own: str) -> None:
        """Use the factors of saved rows that return to an empty cache; own: the cache's key without suffix."""
        for suffix in ("", ":long", ":lengthened") if self._limit is not None else ():
            if key == own + suffix:
                self.rotation, self.suffix = self._long if suffix else self._short, suffix
