"""Qwen2.5-VL's eyes (arXiv:2502.13923): in most layers a patch sees the patches of its window of 112 × 112 pixels only,
so layers run in stages, and windows stand one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby

import numpy as np

from edge.errors import ModelFormatError
from edge.model.cores import Dense
from edge.model.parts.places import Places
from edge.model.structure.layers import Network
from edge.model.towers.pixels import gelu_erf
from edge.model.towers.qwen import EPS, Qwen, matrix
from edge.model.towers.tower import BIASED, Stage, Tile, layer
from edge.records import dataclass
from edge.types import FloatArray, IntArray

_WINDOW = 112  # pixels of its side
_PERIOD = 8  # layers from one in which a patch sees all to the next


@dataclass(frozen=True)
class Qwen25(Qwen):
    """Merged patches follow each other window by window."""

    architectures = ("qwen2vl",)
    limits = 56**2, 28**2 * 1280

    @cached_property
    def network(self) -> Network:
        clip, dense = self.mmproj, Dense(self.mmproj.ffn, biases=("ffn_gate", *BIASED))
        blocks = layer(clip, dense, rope=self.rope, norm_bias=False)
        return Network(clip.hidden, 0, (blocks,) * clip.layers, norm_eps=EPS, encoder_norm=True)

    @property
    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        clip, wide = self.mmproj, self.mmproj.hidden * self.merge**2
        patch = (clip.hidden, 3, clip.patch, clip.patch)
        return {
            "v.patch_embd.weight": patch, "v.patch_embd.weight.1": patch,
            **matrix("mm.0", wide, wide), **matrix("mm.2", clip.projected, wide),
        }  # fmt: skip

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Runs of layers with windows, and of those without. Raises ModelFormatError."""
        if self.window < 1:
            raise ModelFormatError(f"{self.mmproj.file.path}: patches of {self.mmproj.patch} pixels are too large")
        period = self.mmproj.header.count("vision.n_wa_pattern", "layers", default=_PERIOD)
        found, first = list[Stage](), 0
        for windowed, group in groupby(range(self.mmproj.layers), lambda number: (number + 1) % period > 0):
            stop = first + len(list(group))
            found.append(self.stage(first, stop, windowed=windowed, kept=stop == self.mmproj.layers))
            first = stop
        return tuple(found)

    @property
    def window(self) -> int:
        """Merged patches of a window's side."""
        return _WINDOW // self.merge // self.mmproj.patch

    def _windows(self, tile: Tile) -> list[IntArray]:
        """The merged patches of each window."""
        rows, columns = (count // self.merge for count in tile)
        cells = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
        starts = [(top, left) for top in range(0, rows, self.window) for left in range(0, columns, self.window)]
        return [cells[top : top + self.window, left : left + self.window].reshape(-1) for top, left in starts]

    def merged(self, rows: FloatArray, tile: Tile) -> FloatArray:
        cells = super().merged(rows, tile).reshape(-1, self.merge**2, rows.shape[1])
        return np.asarray(cells[np.concatenate(self._windows(tile))].reshape(rows.shape))

    def places(self, tiles: Sequence[Tile], *, windowed: bool = False) -> Places:
        found = super().places(tiles)
        if not windowed:
            return found
        sizes = [self.merge**2 * window.size for tile in tiles for window in self._windows(tile)]
        spans = Places.of_texts(sizes)
        return Places(found.positions, spans.sees, spans.begins)

    def stem(self, tile: FloatArray) -> FloatArray:
        return self.embed(tile)

    def project(self, states: Sequence[FloatArray], tile: Tile) -> FloatArray:
        clip, wide = self.mmproj, self.mmproj.hidden * self.merge**2
        rows = clip.linear("mm.2", gelu_erf(clip.linear("mm.0", states[-1].reshape(-1, wide))))
        return np.asarray(rows[np.argsort(np.concatenate(self._windows(tile)))])
