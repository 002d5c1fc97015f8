"""Qwen's eyes: pictures of any shape, whose patches have rotary positions by row and column; 2 × 2 neighbours become
one row. Qwen3-VL (arXiv:2511.21631) and Qwen3.5; `qwen25.py` has Qwen2.5-VL's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import ceil, floor, sqrt

import numpy as np

from edge.errors import InputError, ModelFormatError, UnsupportedError
from edge.formats.gguf import ArrayRef
from edge.model.cores import Dense, Rope
from edge.model.parts.places import Places
from edge.model.structure.layers import Network
from edge.model.towers.pixels import gelu_erf, joined, normalized, patches_of, resize
from edge.model.towers.tower import BIASED, Layout, PictureTower, Stage, Tile, embedding, layer
from edge.records import dataclass
from edge.types import AnyArray, FloatArray

_FLATTEST = 200  # times as wide as high
_BASE = 10000.0  # of rotary positions
EPS = 1e-6  # of all norms, whatever a file states


@dataclass(frozen=True)
class Qwen(PictureTower):
    """Rows and columns of both versions. Patches follow each other merged row by merged row, the patches of one row of
    the text model side by side."""

    marker = "<|vision_start|><|image_pad|><|vision_end|>"

    @property
    @abstractmethod
    def limits(self) -> tuple[int, int]:
        """The fewest and the most pixels of a picture, unless a file states them."""

    @cached_property
    def merge(self) -> int:
        return self.mmproj.header.count("vision.spatial_merge_size", "heads", default=2)

    @property
    def _factor(self) -> int:
        """Pixels of the side of a merged patch."""
        return self.merge * self.mmproj.patch

    @cached_property
    def pixels(self) -> tuple[int, int]:
        """The fewest and the most of a picture."""
        header, (least, most) = self.mmproj.header, self.limits
        return (
            header.count("vision.image_min_pixels", "context", default=least),
            header.count("vision.image_max_pixels", "context", default=most),
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        least, most = (max(1, pixels // self._factor**2) for pixels in self.pixels)
        steps = [least * 4**power for power in range(8)]
        return *(size for size in steps if size < most), most

    @property
    def rope(self) -> Rope:
        """Half of the pairs go by the row, half by the column, with the same frequencies."""
        size = self.mmproj.hidden // self.mmproj.heads
        return Rope(size, _BASE, halves=True, sections=(size // 4, size // 4), restarts=True)

    def layout(self, width: int, height: int, tokens: int | None = None) -> Layout:
        if max(height, width) > _FLATTEST * min(height, width):
            raise InputError(
                f"the picture has {width} × {height} pixels, and one side may be {_FLATTEST} times the other at most"
            )
        most = self.check_most(tokens, 1)
        height, width = self._resized(height, width, most * self._factor**2)
        grid = height // self._factor, width // self._factor
        self.check_most(tokens, grid[0] * grid[1])
        tile = height // self.mmproj.patch, width // self.mmproj.patch
        return Layout(("<|vision_start|>", grid[0] * grid[1], "<|vision_end|>"), (tile,), height, width, grid)

    def _resized(self, height: int, width: int, most: int) -> tuple[int, int]:
        """Both sides as whole merged patches, within the limits of pixels."""
        factor, least = self._factor, min(self.pixels[0], most)
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rows * columns < least:
            grow = sqrt(least / (height * width))
            rows, columns = (ceil(side * grow / factor) * factor for side in (height, width))
        if rows * columns > most:  # also where that was grown a little too far
            shrink = sqrt(height * width / most)
            rows, columns = (max(factor, floor(side / shrink / factor) * factor) for side in (height, width))
        return rows, columns

    def tiles(self, pixels: AnyArray, layout: Layout) -> Iterator[FloatArray]:
        clip = self.mmproj
        yield normalized(resize(pixels, layout.height, layout.width, "bicubic"), clip.mean, clip.std)

    def places(self, tiles: Sequence[Tile], *, windowed: bool = False) -> Places:
        plain = super().places(tiles)
        return Places(np.concatenate([self.cells(tile) for tile in tiles]), plain.sees, plain.begins)

    def cells(self, tile: Tile) -> AnyArray:
        """Row and column of each patch, int32 [n, 2]."""
        rows, columns = np.mgrid[: tile[0], : tile[1]].astype(np.int32)
        return np.stack([self.merged(each.reshape(-1, 1), tile).reshape(-1) for each in (rows, columns)], axis=1)

    def merged(self, rows: FloatArray, tile: Tile) -> FloatArray:
        """Rows of patches, row by row, in the order of `places`."""
        return joined(rows, *tile, self.merge).reshape(rows.shape)

    def embed(self, tile: FloatArray) -> FloatArray:
        """Rows of patches, in the order of `places`. A still picture stands twice in the kernel of two pictures."""
        clip, patch = self.mmproj, self.mmproj.patch
        both = clip.weights("v.patch_embd.weight") + clip.weights("v.patch_embd.weight.1")
        rows = patches_of(tile, patch) @ both.reshape(clip.hidden, -1).T
        return self.merged(rows, (tile.shape[0] // patch, tile.shape[1] // patch))


@dataclass(frozen=True)
class Qwen3(Qwen):
    """Learned positions are read between the cells of a square table. States behind some layers go into the first
    layers of the text model, too (DeepStack, arXiv:2406.04334): such rows are wider, the embedding first."""

    architectures = ("qwen3vl", "qwen3vlmoe", "qwen35", "qwen35moe")
    limits = 65536, 16777216

    @cached_property
    def network(self) -> Network:
        clip, dense = self.mmproj, Dense(self.mmproj.ffn, "gelu", gated=False, biases=BIASED)
        return Network(
            clip.hidden, 0, (layer(clip, dense, rope=self.rope),) * clip.layers, norm="layer", norm_eps=EPS,
            encoder_norm=True, output_norm_bias=True,
        )  # fmt: skip

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip, wide = self.mmproj, self.mmproj.hidden * self.merge**2
        found = embedding(clip) | {
            "v.patch_embd.weight.1": (clip.hidden, 3, clip.patch, clip.patch),
            "v.position_embd.weight": (self._per_side**2, clip.hidden),
            **matrix("mm.0", wide, wide), **matrix("mm.2", clip.projected, wide),
        }  # fmt: skip
        for number in self.deep:
            name = f"v.deepstack.{number}"
            found |= {f"{name}.norm.weight": (wide,), f"{name}.norm.bias": (wide,)}
            found |= matrix(f"{name}.fc1", wide, wide) | matrix(f"{name}.fc2", clip.projected, wide)
        return found

    @property
    def _per_side(self) -> int:
        return self.mmproj.side // self.mmproj.patch

    @cached_property
    def deep(self) -> tuple[int, ...]:
        """The layers whose states go into the text model's first layers."""
        file, key = self.mmproj.file, "clip.vision.is_deepstack_layers"
        if not isinstance(ref := file.metadata.get(key), ArrayRef):
            return ()
        if ref.count != self.mmproj.layers:
            raise ModelFormatError(f"{file.path}: {key} has {ref.count} values for {self.mmproj.layers} layers")
        found: list[int] = np.flatnonzero(file.numbers(key)).tolist()
        if self.mmproj.layers - 1 in found:
            raise UnsupportedError(f"{file.path}: the states of its last layer go into the text model's layers, too")
        return tuple(found)

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """A stage ends at each layer whose states are used."""
        if not self.deep:
            return super().stages
        bounds = [0, *(number + 1 for number in self.deep), self.mmproj.layers]
        return tuple(self.stage(*each, kept=True) for each in pairwise(bounds))

    def stem(self, tile: FloatArray) -> FloatArray:
        rows, patch = self.embed(tile), self.mmproj.patch
        shape = tile.shape[0] // patch, tile.shape[1] // patch
        table = self.mmproj.weights("v.position_embd.weight").reshape(self._per_side, self._per_side, -1)
        between = _between(_between(table, shape[0]).swapaxes(0, 1), shape[1]).swapaxes(0, 1)
        return np.asarray(
            rows + self.mmproj.weights("v.patch_embd.bias") + self.merged(between.reshape(rows.shape), shape)
        )

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip, wide = self.mmproj, self.mmproj.hidden * self.merge**2
        rows = clip.linear("mm.2", gelu_erf(clip.linear("mm.0", states[-1].reshape(-1, wide))))
        found = [rows]
        for number, each in zip(self.deep, states, strict=False):
            name, joint = f"v.deepstack.{number}", each.reshape(-1, wide)
            centered = joint - joint.mean(axis=1, keepdims=True)
            normed = centered / np.sqrt(np.mean(np.square(centered), axis=1, keepdims=True) + np.float32(EPS))
            normed = normed * clip.weights(f"{name}.norm.weight") + clip.weights(f"{name}.norm.bias")
            found.append(clip.linear(f"{name}.fc2", gelu_erf(clip.linear(f"{name}.fc1", normed))))
        return np.concatenate(found, axis=1)


def matrix(name: str, rows: int, columns: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}


def _between(table: FloatArray, count: int) -> FloatArray:
    """`count` rows at equal steps from the first row to the last, [count, …], each between two of the table's."""
    last = len(table) - 1
    at = np.arange(count, dtype=np.float32) * np.float32(last) / np.float32(max(1, count - 1))
    first = np.clip(np.floor(at), 0, last).astype(np.int32)
    share = (at - first).reshape(-1, *(1,) * (table.ndim - 1))
    return np.asarray(table[first] * (1 - share) + table[np.minimum(first + 1, last)] * share)
