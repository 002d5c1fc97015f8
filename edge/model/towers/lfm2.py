"""LFM2-VL's eyes: SigLIP 2 (arXiv:2502.14786) over pictures of any shape, whose table of positions is resized; large
pictures are divided into square tiles, behind which stands the whole; 2 × 2 neighbours become one row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from math import ceil, floor, sqrt

import numpy as np

from edge.model.structure.layers import Network
from edge.model.towers.pixels import gelu_erf, joined, normalized, patches_of, resize
from edge.model.towers.tower import Layout, PictureTower, Tile, embedding, siglip
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_LEAST, _MOST = 64, 256  # rows of a picture in one piece
_LARGE = 2.0  # a picture with more than this many times the most pixels is divided
_TILE = 512  # pixels of the side of a tile
_TILES = range(2, 11)
_EPS = 1e-5  # of the projector's norm


@dataclass(frozen=True)
class Lfm2(PictureTower):
    """The sizes are those of a picture in one piece, and of 2 to 10 tiles with the whole."""

    marker = "<image>"
    architectures = ("lfm2", "lfm2moe")

    @cached_property
    def network(self) -> Network:
        return siglip(self.mmproj)

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip, wide = self.mmproj, self.mmproj.hidden * self._factor**2
        matrix = clip.file.tensors.get("mm.1.weight")
        between = matrix.shape[-1] if matrix else 0
        return embedding(clip) | {
            "v.position_embd.weight": (self._per_side**2, clip.hidden),
            "[mm.input_norm.weight]": (wide,), "[mm.input_norm.bias]": (wide,),
            "mm.1.weight": (between, wide), "[mm.1.bias]": (between,),
            "mm.2.weight": (clip.projected, between), "[mm.2.bias]": (clip.projected,),
        }  # fmt: skip

    @property
    def _per_side(self) -> int:
        return self.mmproj.side // self.mmproj.patch

    @cached_property
    def _factor(self) -> int:
        return self.mmproj.header.count("vision.projector.scale_factor", "heads", default=2)

    @property
    def _cell(self) -> int:
        """Pixels of the side of a row's cell."""
        return self._factor * self.mmproj.patch

    @property
    def _of_tile(self) -> int:
        return (_TILE // self._cell) ** 2

    @property
    def sizes(self) -> tuple[int, ...]:
        return _LEAST, 2 * _LEAST, _MOST, *(number * self._of_tile + _MOST for number in _TILES)

    def layout(self, width: int, height: int, tokens: int | None = None) -> Layout:
        most = self.check_most(tokens, _LEAST)
        cells = max(1, round(height / self._cell)) * max(1, round(width / self._cell))
        found = self._whole_picture(width, height, min(most, _MOST))
        if cells > _MOST * _LARGE:
            for number in _TILES:
                divided = self._divided(width, height, number)
                found = divided if found.tokens < divided.tokens <= most else found
        self.check_most(tokens, found.tokens)
        return found

    def _whole_picture(self, width: int, height: int, most: int) -> Layout:
        height, width = self._resized(height, width, most)
        tile = height // self.mmproj.patch, width // self.mmproj.patch
        count = tile[0] * tile[1] // self._factor**2
        return Layout(("<|image_start|>", count, "<|image_end|>"), (tile,), height, width)

    def _divided(self, width: int, height: int, most: int) -> Layout:
        """The layout in at most `most` tiles."""
        rows, columns = self._grid(width, height, most)
        whole, side = self._whole_picture(width, height, _MOST), _TILE // self.mmproj.patch
        parts, before = list[str | int](), "<|image_start|>"
        for row in range(rows):
            for column in range(columns):
                parts += [f"{before}<|img_row_{row + 1}_col_{column + 1}|>", self._of_tile]
                before = ""
        parts += ["<|img_thumbnail|>", *whole.parts[1:]]
        tiles = (*((side, side),) * (rows * columns), *whole.tiles)
        return Layout(tuple(parts), tiles, rows * _TILE, columns * _TILE)

    def _grid(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Rows and columns of tiles, with the sides' ratio as near to the picture's as can be."""
        shapes = {
            (across, down)
            for number in range(_TILES.start, most + 1) for across in range(1, number + 1)
            for down in range(1, number + 1) if _TILES.start <= across * down <= most
        }  # fmt: skip
        best, nearest = (1, 1), float("inf")
        for across, down in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
            off = abs(width / height - across / down)
            if off < nearest or (off == nearest and width * height > 0.5 * _TILE**2 * across * down):
                best, nearest = (down, across), off
        return best

    def _resized(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Both sides as whole cells, for the fewest to the most rows."""
        cell = self._cell
        rows, columns = (max(cell, round(side / cell) * cell) for side in (height, width))
        if rows * columns > most * cell**2:
            shrink = sqrt(height * width / (most * cell**2))
            rows, columns = (max(cell, floor(side / shrink / cell) * cell) for side in (height, width))
        elif rows * columns < min(_LEAST, most) * cell**2:
            grow = sqrt(min(_LEAST, most) * cell**2 / (height * width))
            rows, columns = (ceil(side * grow / cell) * cell for side in (height, width))
        return rows, columns

    def tiles(self, pixels: AnyArray, layout: Layout) -> Iterator[FloatArray]:
        clip = self.mmproj
        *_, (rows, columns) = layout.tiles
        if len(layout.tiles) > 1:
            whole = resize(pixels, layout.height, layout.width, "bilinear")
            for top in range(0, layout.height, _TILE):
                for left in range(0, layout.width, _TILE):
                    yield normalized(whole[top : top + _TILE, left : left + _TILE], clip.mean, clip.std)
        yield normalized(resize(pixels, rows * clip.patch, columns * clip.patch, "bilinear"), clip.mean, clip.std)

    def stem(self, tile: FloatArray) -> FloatArray:
        rows = self.mmproj.linear("v.patch_embd", patches_of(tile, self.mmproj.patch))
        height, width = (side // self.mmproj.patch for side in tile.shape[:2])
        table = self.mmproj.weights("v.position_embd.weight").reshape(self._per_side, self._per_side, -1)
        down, across = (_shares(self._per_side, count) for count in (height, width))
        return np.asarray(rows + np.einsum("ha,wb,abn->hwn", down, across, table, optimize=True).reshape(rows.shape))

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip, rows = self.mmproj, joined(states[-1], *tile, self._factor)
        if "mm.input_norm.weight" in clip.file.tensors:
            centered = rows - rows.mean(axis=1, keepdims=True)
            rows = centered / np.sqrt(np.mean(np.square(centered), axis=1, keepdims=True) + np.float32(_EPS))
            rows = rows * clip.weights("mm.input_norm.weight") + clip.weights("mm.input_norm.bias")
        return clip.linear("mm.2", gelu_erf(clip.linear("mm.1", rows)))


def _shares(size: int, count: int) -> FloatArray:
    """The share that each of `size` values has in each of `count`, [count, size]: bilinear, of a wider part where the
    table shrinks."""
    scale = np.float32(size) / np.float32(count)
    centers = (np.arange(count, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5)
    far = np.abs(np.arange(size, dtype=np.float32) - centers[:, None]) / max(scale, np.float32(1))
    shares = np.maximum(1 - far, np.float32(0))
    return np.asarray(shares / shares.sum(axis=1, keepdims=True))
