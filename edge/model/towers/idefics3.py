"""SmolVLM and SmolVLM2, and Idefics 3 (arXiv:2408.12637): SigLIP over square tiles, and over the whole picture as one
more; 4 × 4 or 3 × 3 neighbours become one row (pixel shuffle)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil

import numpy as np

from edge.model.structure.layers import Network
from edge.model.towers.pixels import joined, normalized, patches_of, resize
from edge.model.towers.tower import Layout, PictureTower, Tile, embedding, siglip
from edge.records import dataclass
from edge.types import AnyArray, FloatArray, IntArray

_MOST = 4096  # pixels of a side
_TILES = 4  # of the longer side, where a file states no size
_AROUND, _GLOBAL = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True)
class Idefics3(PictureTower):
    """The sizes of a square picture are those of 1, 2, … tiles on a side."""

    marker = "<image>"
    architectures = ("llama",)

    @cached_property
    def network(self) -> Network:
        return siglip(self.mmproj)

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip, per_side = self.mmproj, self._per_side
        return embedding(clip) | {
            "v.position_embd.weight": (per_side**2, clip.hidden),
            "mm.model.fc.weight": (clip.projected, self._shuffle**2 * clip.hidden),
        }

    @cached_property
    def _shuffle(self) -> int:
        found = self.mmproj.header.count("vision.projector.scale_factor", "heads", default=2)
        return found if self._per_side % found == 0 else 1  # the shape of the projector then refuses the file

    @property
    def _per_side(self) -> int:
        return self.mmproj.side // self.mmproj.patch

    @property
    def _rows(self) -> int:
        """Of a tile."""
        return (self._per_side // self._shuffle) ** 2

    @cached_property
    def _most_tiles(self) -> int:
        """Tiles of the longer side of a picture."""
        stated = self.mmproj.header.count("vision.preproc_image_size", "ffn", default=_TILES * self.mmproj.side)
        return max(1, min(_MOST, stated) // self.mmproj.side)

    @property
    def sizes(self) -> tuple[int, ...]:
        return self._rows, *(self._rows * (number**2 + 1) for number in range(2, self._most_tiles + 1))

    def layout(self, width: int, height: int, tokens: int | None = None) -> Layout:
        most = self.check_most(tokens, self._rows)
        found = [self._layout(width, height, number) for number in range(1, self._most_tiles + 1)]
        return max((each for each in found if each.tokens <= most), key=lambda each: each.tokens)

    def _layout(self, width: int, height: int, number: int) -> Layout:
        """With `number` tiles on the longer side."""
        side, tile = self.mmproj.side, (self._per_side, self._per_side)
        height, width = self._stretched(*self._within(height, width, number * side))
        rows, columns = height // side, width // side
        last: tuple[str | int, ...] = f"{_AROUND}{_GLOBAL}", self._rows, _AROUND
        if rows == columns == 1:
            return Layout(last, (tile,), height, width)
        parts, before = list[str | int](), ""
        for row in range(rows):
            for column in range(columns):
                parts += [f"{before}{_AROUND}<row_{row + 1}_col_{column + 1}>", self._rows]
                before = ""
            before = "\n"
        first, *rest = last
        return Layout((*parts, f"\n\n{first}", *rest), (tile,) * (rows * columns + 1), height, width)

    def _within(self, height: int, width: int, longest: int) -> tuple[int, int]:
        """Height and width with this longer side: the shorter one is cut to a whole number, and made even."""
        ratio = width / height
        if width >= height:
            short = int(longest / ratio)
            return max(1, short + short % 2), longest
        short = int(longest * ratio)
        return longest, max(1, short + short % 2)

    def _stretched(self, height: int, width: int) -> tuple[int, int]:
        """Both sides to whole tiles."""
        side, ratio = self.mmproj.side, width / height
        if width >= height:
            width = ceil(width / side) * side
            return ceil(int(width / ratio) / side) * side, width
        height = ceil(height / side) * side
        return height, ceil(int(height * ratio) / side) * side

    def tiles(self, pixels: AnyArray, layout: Layout) -> Iterator[FloatArray]:
        clip, side = self.mmproj, self.mmproj.side
        longest = max(layout.height, layout.width)
        whole = resize(pixels, *self._within(pixels.shape[0], pixels.shape[1], longest), "lanczos")
        whole = resize(whole, layout.height, layout.width, "lanczos")
        if len(layout.tiles) > 1:
            for top in range(0, layout.height, side):
                for left in range(0, layout.width, side):
                    yield normalized(whole[top : top + side, left : left + side], clip.mean, clip.std)
        yield normalized(resize(whole, side, side, "lanczos"), clip.mean, clip.std)

    def stem(self, tile: FloatArray) -> FloatArray:
        rows = self.mmproj.linear("v.patch_embd", patches_of(tile, self.mmproj.patch))
        near = _nearest(self._per_side)
        table = self.mmproj.weights("v.position_embd.weight").reshape(self._per_side, self._per_side, -1)
        return np.asarray(rows + table[near][:, near].reshape(rows.shape))

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        return self.mmproj.linear("mm.model.fc", joined(states[-1], *tile, self._shuffle))


def _nearest(count: int) -> IntArray:
    """The rows of the table for `count` patches of a side, by fractions in float32 as transformers computes them: a few
    are not the patch's own, where `count` is no power of two."""
    steps = ceil((1 - 1 / count) / (1 / count))
    bounds = (1 / count + np.arange(steps) * (1 / count)).astype(np.float32)
    places = np.minimum(np.arange(count, dtype=np.float32) * np.float32(1 / count), np.float32(1 - 1e-6))
    return np.asarray(np.minimum(np.searchsorted(bounds, places, side="right"), count - 1), np.int32)
