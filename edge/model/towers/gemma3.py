"""Gemma 3's eyes (arXiv:2503.19786): SigLIP over a square into which the picture is stretched, and means of 4 × 4
neighbours, which see all of each other in the text model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from edge.model.structure.layers import Network
from edge.model.towers.pixels import joined, normalized, patches_of, resize
from edge.model.towers.tower import Layout, PictureTower, Tile, embedding, siglip
from edge.records import dataclass
from edge.types import AnyArray, FloatArray


@dataclass(frozen=True)
class Gemma3(PictureTower):
    """Each picture has the same number of rows."""

    marker = "<start_of_image>"
    architectures = ("gemma3",)

    @cached_property
    def network(self) -> Network:
        return siglip(self.mmproj)

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip = self.mmproj
        return embedding(clip) | {
            "v.position_embd.weight": (self._per_side**2, clip.hidden),
            "mm.soft_emb_norm.weight": (clip.hidden,),
            "mm.input_projection.weight": (clip.hidden, clip.projected),
        }

    @property
    def _per_side(self) -> int:
        return self.mmproj.side // self.mmproj.patch

    @cached_property
    def _pool(self) -> int:
        """Neighbours on a side that become one row."""
        return min(self._per_side, self.mmproj.header.count("vision.projector.scale_factor", "heads", default=4))

    @property
    def sizes(self) -> tuple[int, ...]:
        return ((self._per_side // self._pool) ** 2,)

    def layout(self, width: int, height: int, tokens: int | None = None) -> Layout:
        (rows,), side = self.sizes, self.mmproj.side
        self.check_most(tokens, rows)
        parts = ("\n\n<start_of_image>", rows, "<end_of_image>\n\n")
        return Layout(parts, ((self._per_side, self._per_side),), side, side, whole=True)

    def tiles(self, pixels: AnyArray, layout: Layout) -> Iterator[FloatArray]:
        clip = self.mmproj
        yield normalized(resize(pixels, layout.height, layout.width, "bilinear"), clip.mean, clip.std)

    def stem(self, tile: FloatArray) -> FloatArray:
        rows = self.mmproj.linear("v.patch_embd", patches_of(tile, self.mmproj.patch))
        return np.asarray(rows + self.mmproj.weights("v.position_embd.weight"))

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip, whole = self.mmproj, self._per_side // self._pool * self._pool
        square = states[-1].reshape(self._per_side, self._per_side, -1)[:whole, :whole]
        means = joined(square.reshape(whole * whole, -1), whole, whole, self._pool)
        means = means.reshape(len(means), self._pool**2, -1).mean(axis=1)
        squares = np.mean(np.square(means), axis=1, keepdims=True)
        normed = means / np.sqrt(squares + np.float32(clip.eps)) * clip.weights("mm.soft_emb_norm.weight")
        return np.asarray(normed @ clip.weights("mm.input_projection.weight"))
